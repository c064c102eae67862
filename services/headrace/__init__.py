"""headrace, an LLM serving mesh.

A request's way: the **router** admits it, turns its text into token ids, asks the **cache** whether the answer is
already there, asks the **scheduler** who runs it and when, sends the ids to that **worker**, and turns the ids that
come back into text for the client. The router's part is Rust (``headrace._gateway``, from ``gateway_rs/``); Python
starts and watches it. Scheduler, cache and worker are Python around cores that know no clock, socket or task.
"""

__version__ = "0.1.0"
