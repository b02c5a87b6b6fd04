"""Every request to an object store is counted and timed, by operation and outcome."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from models.storage import StoreUnavailable
from tasks.store_metrics import StoreMetrics
from tests.support.object_stores import memory_storage, outage


def test_requests_are_counted_by_operation_and_outcome(tmp_path: Path) -> None:
    registry, storage = CollectorRegistry(), memory_storage(tmp_path)
    storage.observe(StoreMetrics(registry).observe)

    def count(operation: str, outcome: str) -> float | None:
        return registry.get_sample_value("openworld_store_requests_total", {"operation": operation, "outcome": outcome})

    assert count("delete", "refused") == 0, "a rate needs a first value"
    assert storage.put_if_absent("CURRENT", b"1")
    assert not storage.put_if_absent("CURRENT", b"2")
    assert storage.compare_and_set("CURRENT", b"1", b"2")
    assert storage.find("nothing") is None
    assert [found.key for found in storage.list("")] == ["CURRENT"]
    with outage(), pytest.raises(StoreUnavailable):
        storage.get("CURRENT")
    storage.delete(["CURRENT"])
    assert count("put", "ok") == 2
    assert count("put", "conflict") == 1
    assert count("get", "ok") == 1
    assert count("get", "failed") == 1
    assert count("head", "missing") == 1
    assert count("list", "ok")
    assert count("delete", "ok") == 1
    timed = registry.get_sample_value("openworld_store_request_duration_seconds_count", {"operation": "get"})
    assert timed == 2
