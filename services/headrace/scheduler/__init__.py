"""The scheduler service: ``service.py`` does its I/O; ``gateway_rs/core/src/scheduler`` decides."""
