"""The worker: one engine, its batch and its KV. Ids in, ids out.

A request's way through it: ``service.py`` takes it from a router's stream, ``validate.py`` turns it into a value that
cannot be wrong, an engine (``engine.py`` is the protocol) generates, and each iteration's ids go back in one frame.
The engines that batch here (``engines/llama_cpp.py``, ``engines/sim.py``) share ``loop.py``: a thread around the batch
composer (``composer.py``, which decides what the next step computes) and the KV accounts (``kv.py``, which say what it
may hold and what it can reuse). Engines that batch by themselves (``engines/tensorrt_llm.py``) share
``selfbatched.py``: whose turn it is, how each choice ends, and what the engine is believed to be doing.
"""
