"""Everything that a worker tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge, Histogram, disable_created_metrics
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from models.versions.manifest import Manifest
from tasks.queue import TaskQueue

SECONDS = (1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0)


class WorkerMetrics:
    """One set a worker. `task` counts tasks from 0, as the answers do: it grows as slowly as people label."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"openworld_{name}", text, labels, registry=registry)

        self.queue_depth = gauge("task_queue_depth", "Tasks that are kept, by state", "state")
        self.age = gauge("task_age_seconds", "Since the first unfinished task was queued; 0 when there is none")
        self.seconds = Histogram(
            "openworld_train_duration_seconds", "To learn one task, whatever became of it", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self.progress = gauge("train_progress", "Of the task that is being learned, 0 to 1; 0 while idle")
        self.accuracy = gauge("eval_accuracy", "Of a task's held-out images, in the last version learned", "task")
        self.auroc = gauge("eval_auroc", "Of a task's own score against all others, in the last version", "task")
        self.forgetting = gauge("forgetting", "Accuracy that old tasks lost with the last version, on average")
        self.capacity = gauge("capacity_used_ratio", "Share of the fullest adapter that is taken")

    def watch(self, queue: TaskQueue) -> None:
        """How much waits."""
        for state, count in queue.counts().items():
            self.queue_depth.labels(state).set(count)
        self.age.set(queue.oldest_age() or 0.0)

    def finished(self, seconds: float) -> None:
        self.seconds.observe(seconds)
        self.progress.set(0)

    def learned(self, manifest: Manifest) -> None:
        """What the gate found."""
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
