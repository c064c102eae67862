"""What the executor shows of itself."""

from .request import LoRARequest
from .result import CompletionOutput, GenerationResult, IterationResult, Logprob
from .utils import CppExecutorError, RequestError

__all__ = [
    "CompletionOutput",
    "CppExecutorError",
    "GenerationResult",
    "IterationResult",
    "LoRARequest",
    "Logprob",
    "RequestError",
]
