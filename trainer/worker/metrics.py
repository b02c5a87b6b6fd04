"""Prometheus metrics of a worker."""

import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from models.versions.manifest import Manifest
from tasks.queue import TaskQueue
from tasks.store_metrics import StoreMetrics

DURATION_BUCKETS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)  # seconds


class WorkerMetrics:
    """The label `task` is a task's index in the model, from 0; people label slowly, so it has few values."""

    def __init__(self, stall_seconds: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._last_beat = clock, clock()
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"openworld_{name}", text, labels, registry=registry)

        self.queue_depth = gauge("task_queue_depth", "Tasks in the queue's records, by state", "state")
        self.age = gauge("task_age_seconds", "Age of the oldest unfinished task; 0 if there is none")
        self.seconds = Histogram(
            "openworld_train_duration_seconds",
            "Duration of an attempt at a task, whatever its result",
            buckets=DURATION_BUCKETS,
            registry=registry,
        )
        self.progress = gauge("train_progress", "Progress of the current task, 0 to 1; 0 while idle")
        gauge(
            "train_heartbeat_age_seconds", "Time since the worker last asked for a task or finished a unit of work"
        ).set_function(lambda: self.heartbeat_age)
        gauge(
            "train_alive", "1 while the heartbeat is younger than OPENWORLD_TRAIN_STALL_SECONDS; for health checks"
        ).set_function(lambda: float(self.heartbeat_age < stall_seconds))
        self.accuracy = gauge("eval_accuracy", "Accuracy on a task's held-out images, in the last version", "task")
        self.auroc = gauge("eval_auroc", "AUROC of a task's own score against all others, in the last version", "task")
        self.forgetting = gauge("forgetting", "Mean accuracy that old tasks lost with the last version")
        self.store = StoreMetrics(registry)
        self.capacity = gauge("capacity_used_ratio", "Share of used units in the fullest adapter")

    def beat(self) -> None:
        """The worker makes progress. Without beats the process may run but hang."""
        self._last_beat = self._clock()

    @property
    def heartbeat_age(self) -> float:
        return self._clock() - self._last_beat

    def update_queue(self, queue: TaskQueue) -> None:
        for state, count in queue.counts().items():
            self.queue_depth.labels(state).set(count)
        self.age.set(queue.oldest_age() or 0.0)

    def task_finished(self, seconds: float) -> None:
        self.seconds.observe(seconds)
        self.progress.set(0)

    def update_version(self, manifest: Manifest) -> None:
        """Show what the gate measured."""
        lost = []
        for report in manifest.metrics.get("tasks", []):
            task = str(report["task"])
            if report["accuracy_after"] is not None:
                self.accuracy.labels(task).set(report["accuracy_after"])
                if report["accuracy_before"] is not None:
                    lost.append(report["accuracy_before"] - report["accuracy_after"])
            if report["auc_after"] is not None:
                self.auroc.labels(task).set(report["auc_after"])
        self.forgetting.set(sum(lost) / len(lost) if lost else 0.0)
        self.capacity.set(manifest.metrics.get("capacity", {}).get("used_max", 0.0))
