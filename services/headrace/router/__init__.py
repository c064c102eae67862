"""The router: clients, text, tenants, which model.

Its way of a request is Rust (``gateway_rs/src/plane``), because it is what users hold open streams to. Python prepares
the models, starts it, and tells it when to leave.
"""
