"""What the services' Prometheus metrics share: a registry for each service, and bucket bounds.

Labels take values only from closed lists (states, classes, reasons, the pools of the fleet), never from a request, so
that the number of series is bounded by the mesh and not by its traffic. Which metrics there are stands in each
service.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

#: Waits in queues: from what nobody notices to what nobody waits for.
WAIT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: As OpenTelemetry's ``gen_ai.server.time_to_first_token`` has them.
TTFT_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
#: As OpenTelemetry's ``gen_ai.server.time_per_output_token`` has them.
TPOT_BUCKETS_S = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def new_registry() -> CollectorRegistry:
    """A registry of one service, with the process's own figures. Not the global one: a test runs several services."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry
