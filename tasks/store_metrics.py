"""Prometheus metrics of the requests to an object store, for servers and trainers."""

from __future__ import annotations

from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram

from models.storage import Operation, Outcome

SECONDS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)


class StoreMetrics:
    """All series start at zero, so that rates are complete; with local files they stay there."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            "openworld_store_requests_total",
            "Requests to the object store; missing: no such key, conflict: the condition of a write did not hold",
            ("operation", "outcome"),
            registry=registry,
        )
        self._seconds = Histogram(
            "openworld_store_request_duration_seconds",
            "Duration of a request to the object store, whatever its outcome",
            ("operation",),
            registry=registry,
            buckets=SECONDS,
        )
        for operation in get_args(Operation):
            self._seconds.labels(operation)
            for outcome in get_args(Outcome):
                self._requests.labels(operation, outcome)

    def observe(self, operation: Operation, outcome: Outcome, seconds: float) -> None:
        self._requests.labels(operation, outcome).inc()
        self._seconds.labels(operation).observe(seconds)
