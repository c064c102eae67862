"""A real model through the whole mesh against llama.cpp alone: output tokens/s, CPU per token, time to first token.

The ways, each a process (or several) of its own, given the same texts with the same weights, slots and threads:

- `loop`: llama.cpp driven by the plain loop of `engine_bench.py` on ready-made ids; no server, no text;
- `mesh`: router, scheduler, cache and worker, over HTTP as server-sent events;
- `server`: llama.cpp's own `llama-server` over HTTP, with `--llama-server PATH`.

All requests of a round arrive at once, are different texts, and ask for the same number of ids, greedily. The ways take
turns within a round, because a shared machine drifts; a ratio is the median of the rounds' own ratios.

    PYTHONPATH=services python benchmarks/mesh_bench.py --concurrency 1,8,32 --rounds 5
    PYTHONPATH=services python benchmarks/mesh_bench.py --llama-server PATH --json

The added time to first token is measured apart: one stream, short prompts, many pairs of `mesh` and `loop`.
Client and services share the machine with the engine: on two cores with one engine thread that is as much room as a
worker has in the field. Compare ratios, not tokens/s of different days.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh import BenchError, Mesh, Process
from relay_bench import english

from headrace import models
from headrace._gateway import Tokenizer
from headrace.config import WorkerConfig, split_address
from headrace.process import ask_for_huge_pages
from headrace.sse import Connection, EventParser

MODEL = "smollm2-135m"
ANSWER_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Took:
    """One way's run of one round."""

    wall_s: float
    cpu_s: float
    ttft_s: list[float]


class Way(Protocol):
    """Runs texts to the end, all at once."""

    async def run(self, texts: Sequence[str], output_tokens: int) -> Took: ...


class Loop:
    """The plain loop, as a child that is told what to run."""

    def __init__(self, mesh: Mesh, tokenizer: Tokenizer, arguments: argparse.Namespace) -> None:
        settings = [f"--{name}={getattr(arguments, name)}" for name in ("slots", "threads", "quantization")]
        settings.append(f"--kv-tokens={arguments.kv_tokens}")
        self.process = mesh.start("loop", [sys.executable, __file__, "--be-the-loop", *settings], talks=True)
        self.tokenizer = tokenizer

    async def run(self, texts: Sequence[str], output_tokens: int) -> Took:
        order = json.dumps({"prompts": self.tokenizer.encode_batch(texts), "output_tokens": output_tokens})
        before_s = self.process.cpu_s()
        said = await asyncio.to_thread(self.process.tell, order)
        return Took(said["took_s"], self.process.cpu_s() - before_s, said["first_s"])


class Http:
    """Any server with OpenAI's completions, streamed."""

    def __init__(self, address: str, processes: Sequence[Process], extra: dict[str, Any]) -> None:
        self.host, self.port = split_address(address)
        self.processes = processes
        self.extra = extra

    def cpu_s(self) -> float:
        return sum(process.cpu_s() for process in self.processes)

    async def run(self, texts: Sequence[str], output_tokens: int) -> Took:
        before_s = self.cpu_s()
        began_s = time.perf_counter()
        first_s = await asyncio.gather(*(self._one(text, output_tokens) for text in texts))
        return Took(time.perf_counter() - began_s, self.cpu_s() - before_s, list(first_s))

    async def _one(self, text: str, output_tokens: int) -> float:
        """Reads one answer to its end; gives the time to its first event with text."""
        body = {
            "model": MODEL,
            "prompt": text,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        connection, events = Connection(self.host, self.port), EventParser()
        began_s = time.perf_counter()
        first_s, tokens = 0.0, 0
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await connection.send("POST", "/v1/completions", json.dumps(body).encode())
                if connection.response.status != 200:
                    raise BenchError((await connection.body()).decode("utf-8", "replace"))
                async for piece in connection.pieces():
                    for data in events.feed(piece):
                        event = json.loads(data) if data != "[DONE]" else {}
                        if not first_s and any(choice.get("text") for choice in event.get("choices", ())):
                            first_s = time.perf_counter() - began_s
                        tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        finally:
            await connection.close()
        if tokens != output_tokens:
            raise BenchError(f"{tokens} tokens of {output_tokens}")
        return first_s


class Texts:
    """Prose of about so many tokens; never the same twice, and different from its first word on."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.ids = tokenizer.encode(english(400_000))
        self.tokenizer = tokenizer
        self.dice = random.Random(1)
        self.count = 0

    def draw(self, count: int, tokens: int) -> list[str]:
        return [self._one(tokens) for _ in range(count)]

    def _one(self, tokens: int) -> str:
        self.count += 1
        start = self.dice.randrange(len(self.ids) - tokens)
        number = f"{self.count} {self.dice.randrange(10**6)} "
        left = max(1, tokens - len(self.tokenizer.encode(number)))
        return number + self.tokenizer.decode(self.ids[start : start + left])


def start_mesh(mesh: Mesh, arguments: argparse.Namespace) -> Http:
    """The four services with the real model."""
    mesh.config.write_text(
        f"[[models]]\nname = {json.dumps(MODEL)}\nquantization = {json.dumps(arguments.quantization)}\n"
    )
    mesh.core(threads=2)
    mesh.service(
        "worker",
        address="127.0.0.1:0",
        metrics_address="127.0.0.1:0",
        scheduler=mesh.scheduler,
        cache=mesh.cache,
        slots=arguments.slots,
        threads=arguments.threads,
        kv_tokens=arguments.kv_tokens,
        prefix_cache=str(arguments.prefix_cache).lower(),
    )
    names = ("router", "scheduler", "cache", "worker")
    return Http(mesh.http, [mesh.processes[name] for name in names], {})


def start_llama_server(mesh: Mesh, folder: models.ModelFolder, arguments: argparse.Namespace) -> Http:
    """llama.cpp's own server, set as the worker is."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(arguments.llama_server, "--model", str(folder.weights), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(arguments.threads), "--threads-batch", str(arguments.threads)),
        *("--parallel", str(arguments.slots), "--ctx-size", str(arguments.kv_tokens), "--kv-unified"),
        *("--batch-size", str(arguments.slots + 512), "--ubatch-size", "512", "--no-webui"),
    ]
    process = Process("llama-server", command, mesh.folder / "llama-server.log")
    mesh.processes["llama-server"] = process
    return Http(f"127.0.0.1:{port}", [process], {"cache_prompt": False})


async def until_it_answers(way: Http, texts: Texts) -> None:
    """A server that has no ready line is ready when it answers."""
    until_s = time.monotonic() + 60
    while True:
        try:
            await way.run(texts.draw(1, 8), 2)
            return
        except (OSError, BenchError) as error:
            if time.monotonic() > until_s:
                raise BenchError(f"no answer: {error}") from error
            await asyncio.sleep(0.2)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    folder = models.prepare("embedded", arguments.quantization)
    tokenizer = Tokenizer.from_file(folder.tokenizer_json)
    texts = Texts(tokenizer)
    with Mesh() as mesh:
        through_mesh = start_mesh(mesh, arguments)
        await until_it_answers(through_mesh, texts)
        ways: dict[str, Way] = {"loop": Loop(mesh, tokenizer, arguments), "mesh": through_mesh}
        if arguments.llama_server:
            server = start_llama_server(mesh, folder, arguments)
            await until_it_answers(server, texts)
            ways["server"] = server
        rows = [
            await throughput(ways, texts, int(count), arguments)
            for count in arguments.concurrency.split(",")
            if arguments.rounds
        ]
        added = await added_ttft(ways, texts, arguments.ttft_pairs) if arguments.ttft_pairs else {}
        rss_mb = {name: round(process.rss_mb()) for name, process in mesh.processes.items()}
    return {"settings": vars(arguments), "rows": rows, "ttft": added, "rss_mb": rss_mb}


async def throughput(ways: dict[str, Way], texts: Texts, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """All ways at one concurrency, in turns."""
    took: dict[str, list[Took]] = {name: [] for name in ways}
    for round_ in range(arguments.rounds + 1):
        drawn = texts.draw(count, arguments.prompt_tokens)
        for name in list(ways) if round_ % 2 else reversed(ways):
            one = await ways[name].run(drawn, arguments.output_tokens)
            # The first round warms up.
            if round_:
                took[name].append(one)
    tokens = count * arguments.output_tokens
    row: dict[str, Any] = {"concurrency": count}
    for name, runs in took.items():
        pairs = list(zip(took["loop"], runs, strict=True))
        row[name] = {
            "output_tokens_per_s": tokens / statistics.median(run.wall_s for run in runs),
            "speed_ratio_to_loop": statistics.median(loop.wall_s / run.wall_s for loop, run in pairs),
            "speed_ratios": [round(loop.wall_s / run.wall_s, 3) for loop, run in pairs],
            "cpu_s_per_token": statistics.median(run.cpu_s for run in runs) / tokens,
            "cpu_ratio_to_loop": statistics.median(run.cpu_s / loop.cpu_s for loop, run in pairs),
            "ttft_p50_s": statistics.median(statistics.median(run.ttft_s) for run in runs),
        }
    if "server" in took:
        pairs = list(zip(took["server"], took["mesh"], strict=True))
        row["mesh"]["speed_ratio_to_server"] = statistics.median(server.wall_s / mesh.wall_s for server, mesh in pairs)
        row["mesh"]["cpu_ratio_to_server"] = statistics.median(mesh.cpu_s / server.cpu_s for server, mesh in pairs)
    if not arguments.json:
        show(row)
    return row


async def added_ttft(ways: dict[str, Way], texts: Texts, pairs: int) -> dict[str, dict[str, float]]:
    """Time to first token of one stream, and what each way adds to the loop's; prompts of 16 tokens, in ms."""
    first: dict[str, list[float]] = {name: [] for name in ways}
    for pair in range(pairs + 2):
        drawn = texts.draw(1, 16)
        for name in list(ways) if pair % 2 else reversed(ways):
            one = await ways[name].run(drawn, 2)
            if pair >= 2:
                first[name].append(one.ttft_s[0] * 1e3)
    return {
        name: {
            "p50_ms": statistics.median(times),
            "added_p50_ms": statistics.median(times) - statistics.median(first["loop"]),
            "added_paired_p50_ms": statistics.median(ms - loop for ms, loop in zip(times, first["loop"], strict=True)),
        }
        for name, times in first.items()
    }


def show(row: dict[str, Any]) -> None:
    for name, of_way in row.items():
        if name == "concurrency":
            continue
        beside = "".join(f"  {key} {of_way[key]:.3f}" for key in of_way if key.endswith("_to_server"))
        print(
            f"{row['concurrency']:4d} {name:7s} {of_way['output_tokens_per_s']:8.1f} tok/s"
            f"  speed ratio to loop {of_way['speed_ratio_to_loop']:.3f}"
            f"  CPU ms/token {of_way['cpu_s_per_token'] * 1e3:6.2f} ({of_way['cpu_ratio_to_loop']:.3f} x loop)"
            f"  TTFT p50 {of_way['ttft_p50_s'] * 1e3:7.1f} ms{beside}",
            flush=True,
        )


def be_the_loop(arguments: argparse.Namespace) -> None:
    """The child: orders by stdin, results by stdout."""
    from engine_bench import PlainLoop

    config = WorkerConfig(slots=arguments.slots, threads=arguments.threads, kv_tokens=arguments.kv_tokens)
    loop = PlainLoop(models.prepare("embedded", arguments.quantization), config)
    print(json.dumps({"ready": "loop"}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        took_s, first_s = loop._run(order["prompts"], order["output_tokens"])
        print(json.dumps({"took_s": took_s, "first_s": first_s}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--ttft-pairs", type=int, default=25, help="0 = do not measure the added time to first token")
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kv-tokens", type=int, default=16384)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument(
        "--no-prefix-cache", dest="prefix_cache", action="store_false", help="the worker keeps no KV of earlier prompts"
    )
    parser.add_argument("--llama-server", default="", help="path of the program to run beside")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--be-the-loop", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be_the_loop:
        # As the worker does, so that both run on the same pages.
        ask_for_huge_pages()
        be_the_loop(arguments)
        return
    if arguments.llama_server and not Path(arguments.llama_server).is_file():
        sys.exit(f"mesh_bench: no such program: {arguments.llama_server}")
    try:
        result = asyncio.run(measure(arguments))
    except BenchError as error:
        sys.exit(f"mesh_bench: {error}")
    if arguments.json:
        print(json.dumps(result, indent=1))
        return
    for name, of_way in result["ttft"].items():
        print(
            f"TTFT of one stream, 16-token prompt: {name:7s} p50 {of_way['p50_ms']:6.2f} ms"
            f"  added {of_way['added_p50_ms']:+6.2f} ms (paired {of_way['added_paired_p50_ms']:+6.2f})"
        )
    print("RSS MB:", result["rss_mb"])


if __name__ == "__main__":
    main()
