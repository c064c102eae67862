"""A slice of a trace, as a simulator reads it and as a live mesh is asked it: the same arrivals, lengths and shared
beginnings.

Rows are of Mooncake's format: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` (names of blocks of 512
tokens, each with all before it).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from headrace.v1 import router_pb2, router_pb2_grpc, types_pb2

BLOCK_TOKENS = 512


@dataclass(frozen=True)
class Row:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def ids(self, number: int) -> list[int]:
        """A prompt that shares with others what their blocks share; ids of the toy model's bytes."""
        ids: list[int] = []
        for block in self.blocks[: self.prompt_tokens // BLOCK_TOKENS]:
            draw = random.Random(block)
            ids += [draw.randrange(256) for _ in range(BLOCK_TOKENS)]
        own = random.Random(f"own {number}")
        return ids + [own.randrange(256) for _ in range(self.prompt_tokens - len(ids))]


def drawn(seed: int, requests: int, per_s: float, roots: int = 6) -> list[Row]:
    """Made up: conversations that begin alike, a few of their turns, and some prompts of their own."""
    draw = random.Random(seed)
    at_s, names = 0.0, roots
    rows: list[Row] = []
    talks: list[tuple[int, ...]] = [(root,) for root in range(1, roots + 1)]
    for _ in range(requests):
        at_s += draw.expovariate(per_s)
        which = draw.randrange(len(talks))
        blocks = talks[which]
        more = draw.choice((0, 0, 1, 1, 2))
        for _ in range(more):
            names += 1
            blocks += (names,)
        # A talk that grew long begins anew.
        talks[which] = blocks if len(blocks) < 5 else blocks[:1]
        own = draw.randrange(40, BLOCK_TOKENS - 1)
        rows.append(Row(at_s, len(blocks) * BLOCK_TOKENS + own, draw.randrange(2, 14), blocks))
    return rows


def read(path: Path, from_s: float, requests: int, shorter: int) -> list[Row]:
    """So many requests of a trace of that format from then on, with prompts and answers `shorter` times as short.

    Its stamps are known to three seconds: arrivals are spread within.
    """
    rows: list[Row] = []
    draw = random.Random(str(from_s))
    for line in path.read_text().splitlines():
        row = json.loads(line)
        at_s = row["timestamp"] / 1000 - from_s
        if at_s < 0 or len(rows) >= requests:
            continue
        tokens = max(1, row["input_length"] // shorter)
        blocks = tuple(row["hash_ids"][: tokens // BLOCK_TOKENS])
        rows.append(Row(at_s + 3 * draw.random(), tokens, max(1, row["output_length"] // shorter), blocks))
    return sorted(rows, key=lambda row: row.at_s)


def mooncake(rows: Sequence[Row]) -> str:
    """The rows as a trace's text."""
    return "\n".join(
        json.dumps(
            {
                "timestamp": row.at_s * 1000,
                "input_length": row.prompt_tokens,
                "output_length": row.output_tokens,
                "hash_ids": list(row.blocks),
            }
        )
        for row in rows
    )


@dataclass
class Life:
    """What became of one request; seconds since it was sent, NaN where nothing came."""

    ttft_s: float = float("nan")
    finished_s: float = float("nan")
    tokens: int = 0
    rejected: bool = False

    def good(self, ttft_s: float, tpot_s: float) -> bool:
        """First token and pace within the targets."""
        pace_s = (self.finished_s - self.ttft_s) / max(1, self.tokens - 1)
        return self.ttft_s <= ttft_s and (self.tokens < 2 or pace_s <= tpot_s)


async def play(
    address: str, model: str, rows: Sequence[Row], *, ttft_s: float | None = None, tpot_s: float | None = None
) -> list[Life]:
    """Asks a live router for each at its time, through the native door; the targets go with each request."""
    loop = asyncio.get_running_loop()
    asks = [
        router_pb2.GenerateRequest(
            model=model,
            ids=router_pb2.TokenIds(ids=row.ids(number)),
            stopping=router_pb2.StoppingOptions(max_tokens=row.output_tokens, ignore_eos=True),
            bypass_cache=True,
            ttft_target_ms=round(ttft_s * 1000) if ttft_s else None,
            tpot_target_ms=round(tpot_s * 1000) if tpot_s else None,
            **{"class": types_pb2.REQUEST_CLASS_STANDARD},
        )
        for number, row in enumerate(rows)
    ]
    async with grpc.aio.insecure_channel(address) as channel:
        stub = router_pb2_grpc.InferenceServiceStub(channel)
        began_s = loop.time() + 0.2

        async def ask(number: int) -> Life:
            life = Life()
            await asyncio.sleep(began_s + rows[number].at_s - loop.time())
            # By plan, not by when this task had its turn: the simulator's clients are never late either.
            sent_s = began_s + rows[number].at_s
            try:
                async for event in stub.Generate(asks[number]):
                    if event.WhichOneof("event") == "delta" and event.delta.ids:
                        if not life.tokens:
                            life.ttft_s = loop.time() - sent_s
                        life.tokens += len(event.delta.ids)
                        life.finished_s = loop.time() - sent_s
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                life.rejected = True
            return life

        return await asyncio.gather(*(ask(number) for number in range(len(rows))))
