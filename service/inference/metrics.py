"""The server's Prometheus metrics: names, help texts, labels and buckets.

The number of series is bounded: routes are templates, clients are the names of keys, and only the `KEPT_VERSIONS`
versions that answered last have series.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import suppress
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from models.errors import Damage
from models.versions.manifest import Manifest
from service.inbox import DropReason
from service.inference.drift import ScoreDrift
from tasks.store_metrics import StoreMetrics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# Finer, for the quantiles of GET /pulse: a bucket ends at no more than 1.7 times its start.
REQUEST_SECONDS = (
    *(step * unit / 10_000 for unit in (10, 100, 1000, 10_000) for step in (1, 1.5, 2.5, 3.5, 5, 7.5)),
    *(10.0, 15.0, 20.0, 30.0),
)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUANTILES = tuple(round(0.05 * step, 2) for step in range(1, 21))
KEPT_VERSIONS = 8

OUTCOMES = ("known", "novel", "error")
STAGES = ("read", "decode", "queue", "score")
REJECTED = ("queue_full", "key_busy", "rate_limited", "body_too_slow", "not_ready", "deadline_passed", "abandoned")

# Too slow to send or read, closed in favour of a new connection, and refused because all had a request in progress.
CONNECTIONS_CLOSED = ("timeout", "evicted", "refused")


class Metrics:
    """The metrics of one server. Series whose labels are known in advance start at zero, so that rates are complete."""

    def __init__(self, drift: ScoreDrift | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # omits the `_created` series
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"openworld_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"openworld_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"openworld_{name}", text, labels, registry=registry, buckets=buckets)

        self.requests = counter("requests_total", "Requests answered, by route template and status", "route", "code")
        self.request_seconds = histogram(
            "request_duration_seconds",
            "From the first byte of a request to the last byte of its response",
            REQUEST_SECONDS,
            "route",
        )
        # Not exported: for GET /pulse, which counts only requests that were answered.
        self.answer_seconds = Histogram("answer", "Duration of POST /predict", registry=None, buckets=REQUEST_SECONDS)
        self.predictions = counter(
            "predictions_total",
            "Images answered: known, novel, or error if the image could not be read",
            *("outcome", "version", "client"),
        )
        self.calibrated_score = histogram(
            "calibrated_score", "Quantile of an image's score among held-out known images", QUANTILES, "version"
        )
        self.reference_points = gauge(
            "score_reference_points", "Held-out scores behind the calibrated score, at most 256"
        )
        self._drift = drift or ScoreDrift()
        registry.register(_DriftCollector(self._drift))
        stage_seconds = histogram(
            "stage_duration_seconds",
            "Time in a stage: read (per request), decode and queue (per image), score (per batch)",
            SECONDS,
            "stage",
        )
        self.stages = {stage: stage_seconds.labels(stage) for stage in STAGES}
        self.batch_size = histogram("batch_size", "Images per computed batch", IMAGES)
        self.queue_depth = gauge("queue_depth", "Images decoded and waiting to be computed")
        self.in_flight = gauge("in_flight_images", "Images in progress: being read, decoded, queued or computed")
        self.connections = gauge("connections", "Open connections")
        self.connections_closed = counter(
            "connections_closed_total", "Connections closed because of a limit, by reason", "reason"
        )
        self.engine_failures = counter("engine_failures_total", "Batches that could not be computed")
        self.rejected = counter("rejected_total", "Requests without an answer, by reason", "reason")
        self.ready = gauge("ready", "1 while a version is loaded and computes, and the server is not draining")
        self.model_info = gauge("model_info", "1 for the active version", "version", "sha256")
        # Of the active version, 0 to 1. A series is absent if the version has no such figure.
        self.version_accuracy = gauge("version_accuracy", "Accuracy that fresh images should confirm", "version")
        self.version_novelty_auc = gauge(
            "version_novelty_auc", "AUC of known against novel images that fresh images should confirm", "version"
        )
        self.version_novel_above = gauge(
            "version_novel_above", "The threshold as a probability: a larger p_novel is novel", "version"
        )
        self.version_target = gauge(
            "version_target_ratio",
            "What the threshold was set to: the share of known images to accept, or of simulated novel ones to flag",
            *("version", "target"),
        )
        self.pending_tasks = gauge(
            "pending_tasks", "Tasks of the active version that answer in closed form and are not learned yet"
        )
        self.swaps = counter("model_swaps_total", "Times that another version became active")
        self.load_failures = counter("model_load_failures_total", "Failed attempts to load a version", "reason")
        self.load_seconds = histogram(
            "model_load_duration_seconds", "Time to verify, load and warm up a version", SECONDS
        )
        self.novelties = gauge("novelties", "Images in the inbox, by state", "state")
        self.novelties_bytes = gauge("novelties_bytes", "Bytes of the images in the inbox")
        self.inbox_missing = gauge(
            "inbox_missing", "1 while this server keeps no novel images: another one has the inbox, or it is damaged"
        )
        self.novelties_folded = counter(
            "novelties_folded_total", "Novel images that were counted as another copy of a similar novelty"
        )
        self.novelties_dropped = counter("novelties_dropped_total", "Novel images that were not kept", "reason")

        self.store = StoreMetrics(registry)

        for closed in CONNECTIONS_CLOSED:
            self.connections_closed.labels(closed)
        for reason in REJECTED:
            self.rejected.labels(reason)
        for damage in get_args(Damage):
            self.load_failures.labels(damage)
        for dropped in get_args(DropReason):
            self.novelties_dropped.labels(dropped)
        self._versions: deque[str] = deque(maxlen=KEPT_VERSIONS)  # versions with series, the last used one last
        self._clients: set[str] = set()
        self._anonymous = CollectorRegistry(auto_describe=False)
        self._anonymous.register(_SumOverClients(registry))
        self._active = 0  # 0: nothing is learned, and scores have no meaning

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self.requests.labels(route, str(status)).inc()
        self.request_seconds.labels(route).observe(seconds)
        if route == "/predict" and 200 <= status < 300:
            self.answer_seconds.observe(seconds)

    def count_prediction(self, outcome: str, version: int, client: str, calibrated_score: float | None = None) -> None:
        """Count one answered image."""
        label = self._version_label(version)
        self._clients.add(client)
        self.predictions.labels(outcome, label, client).inc()
        if calibrated_score is not None:
            self.calibrated_score.labels(label).observe(calibrated_score)
            if version and version == self._active:
                self._drift.observe(calibrated_score)

    def set_active_version(
        self, version: int, sha256: str, reference_points: int = 0, manifest: Manifest | None = None
    ) -> None:
        """`manifest` is None for version 0, which has no figures."""
        self._active = version
        self._drift.reset()
        self.reference_points.set(reference_points)
        self.model_info.clear()
        self.model_info.labels(self._version_label(version), sha256).set(1)
        for gauge in (self.version_accuracy, self.version_novelty_auc, self.version_novel_above, self.version_target):
            gauge.clear()
        self.pending_tasks.set(len(manifest.pending) if manifest else 0)
        if manifest is not None:
            self._show_figures(str(version), manifest)

    def _show_figures(self, version: str, manifest: Manifest) -> None:
        """What a version estimates of itself, and its threshold."""
        metrics, settings = manifest.metrics, manifest.settings
        self.version_novel_above.labels(version).set(manifest.novel_above)
        if metrics.get("accuracy") is not None:
            self.version_accuracy.labels(version).set(metrics["accuracy"])
        if metrics.get("novelty_auc") is not None:
            self.version_novelty_auc.labels(version).set(metrics["novelty_auc"])
        target = "accept" if settings.get("flag") is None else "flag"  # `flag` precedes `accept`
        if settings.get(target) is not None:
            self.version_target.labels(version, target).set(settings[target])

    def _version_label(self, version: int) -> str:
        label = str(version)
        if self._versions and self._versions[-1] == label:
            return label
        if label in self._versions:
            self._versions.remove(label)
        elif len(self._versions) == KEPT_VERSIONS:
            self._drop_series(self._versions[0])
        self._versions.append(label)
        return label

    def _drop_series(self, version: str) -> None:
        # Older releases of prometheus_client raise KeyError for a series that does not exist.
        for client in self._clients:
            for outcome in OUTCOMES:
                with suppress(KeyError):
                    self.predictions.remove(outcome, version, client)
        with suppress(KeyError):
            self.calibrated_score.remove(version)

    def text(self, *, client_names: bool = True) -> bytes:
        """All series; without `client_names` they are summed over clients."""
        return generate_latest(self.registry if client_names else self._anonymous)


class _SumOverClients(Collector):
    """The series of a registry without the label `client`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            if not any("client" in sample.labels for sample in family.samples):
                yield family
                continue
            sums = defaultdict[tuple[str, tuple[tuple[str, str], ...]], float](float)
            for sample in family.samples:
                labels = tuple((name, value) for name, value in sample.labels.items() if name != "client")
                sums[sample.name, labels] += sample.value
            merged = Metric(family.name, family.documentation, family.type)
            for (name, series), value in sums.items():
                merged.add_sample(name, dict(series), value)
            yield merged


class _DriftCollector(Collector):
    """Exports the drift index. While there are too few scores the series is absent, not NaN.

    An absent series fires no alert and does not spoil averages over replicas; after a swap Prometheus ends the series
    of the earlier version at the next scrape.
    """

    def __init__(self, drift: ScoreDrift) -> None:
        self._drift = drift

    def collect(self) -> Iterator[Metric]:
        index = GaugeMetricFamily(
            "openworld_score_drift_psi",
            "Population stability index of the calibrated scores against uniform; absent while there are too few",
        )
        if (value := self._drift.index) is not None:
            index.add_metric([], value)
        yield index
        yield GaugeMetricFamily(
            "openworld_score_drift_samples", "Scores in the window of the index", value=self._drift.samples
        )
