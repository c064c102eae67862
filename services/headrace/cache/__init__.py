"""The cache: "what do we already have?"

``responses.py`` knows the finished answers that may be given again and who is generating one now (single flight);
``_gateway.BlockHub`` knows which worker holds which KV blocks, from the workers' own events, and lets schedulers and
routers follow. Both are sans-IO cores: time is an argument. ``service.py`` is their driver: streams, the clock, spans
and metrics. The cache knows keys and ids, never text, and the mesh works without it: whatever it doesn't know is
generated.
"""
