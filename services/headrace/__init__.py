"""headrace, an LLM serving mesh.

A request's way: the **router** admits it, turns its text into token ids, asks the **cache** whether the answer is
already there, asks the **scheduler** who runs it and when, sends the ids to that **worker**, and turns the ids that
come back into text for the client. The router's part is Rust (``headrace._gateway``, from ``gateway_rs/``); Python
starts and watches it. Scheduler, cache and worker are Python around cores that know no clock, socket or task.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.tokenizer import Tokenizer

__all__ = ["Tokenizer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Not imported before it is asked for: the extension is large, and most processes don't need it.
    if name == "Tokenizer":
        from headrace.tokenizer import Tokenizer

        return Tokenizer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
