"""Prompt-lookup speculation of the llama.cpp engine, on against off: tokens a second, acceptance, and the same text.

Two kinds of prompts: `summary` asks for a text's sentences again in short, so that the answer repeats its prompt;
`question` asks for something new, where there is little to guess. Each is asked by so many at once, greedily. The runs
are interleaved; a ratio is the median of the rounds' own.

    PYTHONPATH=services .venv/bin/python benchmarks/speculation_bench.py [--concurrency 1,4,16] [--rounds 3] [--json]

The weights are BF16, whose greedy text does not depend on a batch's shape here; with Q8_0 a near-tie may fall the other
way.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from typing import Any

from headrace import models
from headrace.config import WorkerConfig
from headrace.tokenizer import Tokenizer
from headrace.worker.engine import Request, StepResult, Stopping
from headrace.worker.engines.llama_cpp import LlamaBackend
from headrace.worker.loop import BatchLoop

TEXT = (
    "The city council met on Tuesday evening to discuss the new tram line along the river. Engineers presented three "
    "routes, of which the shortest crosses the old market square. Shop owners feared that two years of construction "
    "would cost them their customers, and asked for compensation. The mayor promised that the work would be done at "
    "night wherever possible, and that the square would stay open to people on foot. A group of students argued that "
    "the longer route past the university would serve more people. The council will vote on the three routes in May."
)
PROMPTS = {
    "summary": f"Repeat the key sentences of the following report word for word, as a list.\n\n{TEXT}",
    "question": "Write a short story about a lighthouse keeper who finds a message in a bottle.",
}


class Bench:
    """An engine and what its requests gave."""

    def __init__(self, folder: models.ModelFolder, draft_tokens: int) -> None:
        config = WorkerConfig(slots=16, kv_tokens=16384, draft_tokens=draft_tokens)
        self.engine = BatchLoop(LlamaBackend(folder, config))
        self._answers: dict[int, list[int]] = {}
        self._open = 0
        self._over = asyncio.Event()
        self._keys = itertools.count(1)

    async def start(self) -> None:
        """Loads."""
        loop = asyncio.get_running_loop()

        def failed(why: str) -> None:
            raise SystemExit(why)

        await self.engine.start(lambda result: loop.call_soon_threadsafe(self._on_step, result), failed)

    def _on_step(self, result: StepResult) -> None:
        for delta in result.deltas:
            self._answers.setdefault(delta.key, []).extend(delta.ids)
            self._open -= delta.finish is not None
        if self._open == 0:
            self._over.set()

    async def ask(self, prompts: list[list[int]], tokens: int, eos: frozenset[int]) -> tuple[float, list[list[int]]]:
        """Seconds, and the answers."""
        self._answers, self._open = {}, len(prompts)
        self._over.clear()
        keys = [next(self._keys) for _ in prompts]
        began_s = time.perf_counter()
        for key, prompt in zip(keys, prompts, strict=True):
            refusal = self.engine.submit(Request(key, prompt, Stopping(tokens, ignore_eos=True, eos_ids=eos)))
            if refusal is not None:
                raise SystemExit(refusal.message)
        await self._over.wait()
        return time.perf_counter() - began_s, [self._answers[key] for key in keys]


async def run(options: argparse.Namespace) -> None:
    """All cases."""
    folder = models.prepare("embedded", "BF16")
    tokenizer = Tokenizer.from_folder(folder.path)
    eos = frozenset(folder.eos_ids)
    benches = {"off": Bench(folder, 0), "on": Bench(folder, options.draft_tokens)}
    for bench in benches.values():
        await bench.start()
    if not options.json:
        print("| prompt | at once | tokens/s off | on | ratio | accepted of drafted | same text |")
        print("|---|---|---|---|---|---|---|")
    for kind, concurrency in itertools.product(PROMPTS, map(int, options.concurrency.split(","))):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[kind]}])
        rates: dict[str, list[float]] = {name: [] for name in benches}
        texts: dict[str, Any] = {}
        before = benches["on"].engine.load()
        for _ in range(options.rounds):
            for name, bench in benches.items():
                seconds, texts[name] = await bench.ask([prompt] * concurrency, options.tokens, eos)
                rates[name].append(concurrency * options.tokens / seconds)
        await asyncio.sleep(0.1)
        after = benches["on"].engine.load()
        drafted = after.draft_tokens_total - before.draft_tokens_total
        accepted = after.accepted_draft_tokens_total - before.accepted_draft_tokens_total
        ratio = statistics.median(on / off for on, off in zip(rates["on"], rates["off"], strict=True))
        same = texts["on"] == texts["off"]
        off, on = (statistics.median(rates[name]) for name in ("off", "on"))
        if options.json:
            row = {"prompt": kind, "concurrency": concurrency, "off": off, "on": on, "ratio": ratio}
            print(json.dumps(row | {"drafted": drafted, "accepted": accepted, "same": same}), flush=True)
        else:
            share = f"{accepted} of {drafted}"
            print(f"| {kind} | {concurrency} | {off:.0f} | {on:.0f} | {ratio:.2f} | {share} | {same} |", flush=True)
    for bench in benches.values():
        await bench.engine.stop()


def main() -> None:
    """See the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
