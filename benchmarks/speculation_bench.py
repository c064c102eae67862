"""Speculation of the llama.cpp engine, on against off: tokens a second, acceptance, and the same text.

`lookup` guesses from the prompt, `model` also by a drafting model: the same one with Q4_0 weights, as large in all but
bytes, so that it has to find out that it does not pay. `tried at last`: ids drafted for each id of the answers in the
last round.

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

    def __init__(self, folder: models.ModelFolder, draft_tokens: int, draft: models.ModelFolder | None = None) -> None:
        config = WorkerConfig(slots=16, kv_tokens=16384, draft_tokens=draft_tokens)
        self.engine = BatchLoop(LlamaBackend(folder, config, draft))
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
    off = Bench(folder, 0)
    others = {
        "lookup": Bench(folder, options.draft_tokens),
        "model": Bench(folder, options.draft_tokens, models.prepare("embedded", "Q4_0")),
    }
    for bench in (off, *others.values()):
        await bench.start()
    if not options.json:
        print(
            "| prompt | at once | guesses by | tokens/s off | on | ratio | accepted of drafted | tried at last "
            "| same text |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
    for kind, concurrency in itertools.product(PROMPTS, map(int, options.concurrency.split(","))):
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPTS[kind]}])
        asked = [prompt] * concurrency
        tokens = concurrency * options.tokens
        rates: dict[str, list[float]] = {name: [] for name in ("off", *others)}
        tried: dict[str, float] = {}
        same: dict[str, bool] = {}
        before = {name: bench.engine.load() for name, bench in others.items()}
        for _ in range(options.rounds):
            seconds, text = await off.ask(asked, options.tokens, eos)
            rates["off"].append(tokens / seconds)
            for name, bench in others.items():
                drafted = bench.engine.load().draft_tokens_total
                seconds, answers = await bench.ask(asked, options.tokens, eos)
                rates[name].append(tokens / seconds)
                same[name] = answers == text
                await asyncio.sleep(0.1)
                tried[name] = (bench.engine.load().draft_tokens_total - drafted) / tokens
        for name, bench in others.items():
            after = bench.engine.load()
            drafted = after.draft_tokens_total - before[name].draft_tokens_total
            accepted = after.accepted_draft_tokens_total - before[name].accepted_draft_tokens_total
            ratio = statistics.median(on / off for on, off in zip(rates[name], rates["off"], strict=True))
            row = {
                "prompt": kind,
                "concurrency": concurrency,
                "guesses_by": name,
                "off": statistics.median(rates["off"]),
                "on": statistics.median(rates[name]),
                "ratio": ratio,
                "drafted": drafted,
                "accepted": accepted,
                "tried_at_last": tried[name],
                "same": same[name],
            }
            if options.json:
                print(json.dumps(row), flush=True)
            else:
                print(
                    f"| {kind} | {concurrency} | {name} | {row['off']:.0f} | {row['on']:.0f} | {ratio:.2f} "
                    f"| {accepted} of {drafted} | {tried[name]:.2f} | {same[name]} |",
                    flush=True,
                )
    for bench in (off, *others.values()):
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
