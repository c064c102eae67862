"""What prefill and decode cost in the sim engine, which waits for it.

Linear by default, for tests of the mesh that need no GPU's figures; or by a cost table, and then by the same Rust code
as the simulator, so that a live mesh of sim workers and a simulated one take the same time for the same steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace._gateway import CostTable


@dataclass(frozen=True)
class Timing:
    """A worker's speed: prefill by prompt tokens, a decoding step by its sequences; or a table's."""

    prefill_tokens_per_s: float = 8000.0
    #: A decoding step of one sequence.
    step_s: float = 0.010
    #: For each further sequence in the step.
    step_s_per_sequence: float = 0.0001
    #: In place of all these.
    table: CostTable | None = None
    #: All times are multiplied by this.
    slowdown: float = 1.0

    def step(self, decodes: int, context_tokens: int, chunks: Sequence[tuple[int, int]]) -> float:
        """Seconds that a step takes.

        It has so many decoding sequences with so many tokens in their KV, and chunks of prompts: (tokens, tokens of the
        same prompt before them).
        """
        if self.table is not None:
            return self.slowdown * self.table.step_s(decodes, context_tokens, chunks)
        return self.slowdown * self._linear(decodes, chunks)

    def _linear(self, decodes: int, chunks: Sequence[tuple[int, int]]) -> float:
        prefill_s = sum(tokens for tokens, _ in chunks) / self.prefill_tokens_per_s
        if decodes == 0:
            return prefill_s
        return prefill_s + self.step_s + self.step_s_per_sequence * (decodes - 1)
