"""What prefill and decode cost: one function, waited for by the sim engine and added to its clock by a simulator."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """A worker's speed. Linear: prefill by prompt tokens, a decoding step by its sequences."""

    prefill_tokens_per_s: float = 8000.0
    #: A decoding step of one sequence.
    step_s: float = 0.010
    #: For each further sequence in the step.
    step_s_per_sequence: float = 0.0001

    def step(self, prefill_tokens: int, decode_sequences: int) -> float:
        """Seconds that a step with so many prompt tokens and decoding sequences takes."""
        prefill_s = prefill_tokens / self.prefill_tokens_per_s
        if decode_sequences == 0:
            return prefill_s
        return prefill_s + self.step_s + self.step_s_per_sequence * (decode_sequences - 1)
