"""Everything that the server tells Prometheus: names, help texts, labels and buckets in one short file.

Labels are bounded: routes are templates, codes are statuses, clients are the keys there are, and series of versions
that have not served for a while are dropped (`KEPT_VERSIONS`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from models.errors import Damage
from service.inbox import DropReason
from service.inference.drift import ScoreDrift

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUANTILES = tuple(round(0.05 * step, 2) for step in range(1, 21))
KEPT_VERSIONS = 8

OUTCOMES = ("known", "novel", "error")
STAGES = ("read", "decode", "queue", "score")
REJECTED = ("queue_full", "rate_limited", "not_ready", "deadline_passed", "abandoned")
LOAD_FAILURES: tuple[Damage, ...] = ("missing", "changed", "backbone", "schema", "invalid", "runtime")
DROPPED: tuple[DropReason, ...] = ("rate", "too_large", "unreadable", "queue", "error")


class Metrics:
    """One set a server; series whose labels are known beforehand start at zero, so that rates have a beginning."""

    def __init__(self, drift: ScoreDrift | None = None) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody asks for
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
            "request_duration_seconds", "From a request's first byte to its answer's last", SECONDS, "route"
        )
        self.predictions = counter(
            "predictions_total",
            "Images answered: known, novel, or error when an image could not be read",
            *("outcome", "version", "client"),
        )
        self.calibrated_score = histogram(
            "calibrated_score", "Quantile of an image's score among held-out known images", QUANTILES, "version"
        )
        self.reference_points = gauge(
            "score_reference_points", "Held-out scores that the calibrated score is a quantile of, 256 at most"
        )
        self._drift = drift or ScoreDrift()
        registry.register(_DriftCollector(self._drift))
        self.stage_seconds = histogram(
            "stage_duration_seconds",
            "Time in a stage: read (a request's body), decode (an image), queue (an image), score (a batch)",
            SECONDS,
            "stage",
        )
        self.batch_size = histogram("batch_size", "Images computed at once", IMAGES)
        self.queue_depth = gauge("queue_depth", "Images decoded and waiting to be computed")
        self.in_flight = gauge("in_flight_images", "Images inside the server: being read, decoded, waiting or computed")
        self.rejected = counter("rejected_total", "Requests that got no answer, by reason", "reason")
        self.ready = gauge("ready", "1 while the server is loaded, warm and not draining")
        self.model_info = gauge("model_info", "1 for the version that answers now", "version", "sha256")
        self.swaps = counter("model_swaps_total", "Times that another version began to answer")
        self.load_failures = counter("model_load_failures_total", "Versions that could not be loaded", "reason")
        self.load_seconds = histogram("model_load_duration_seconds", "To verify, load and warm a version", SECONDS)
        self.novelties = gauge("novelties", "Images in the inbox, by state", "state")
        self.novelties_bytes = gauge("novelties_bytes", "Bytes of the images in the inbox")
        self.novelties_folded = counter("novelties_folded_total", "Novel images like one that was there already")
        self.novelties_dropped = counter("novelties_dropped_total", "Novel images that were not kept", "reason")

        for stage in STAGES:
            self.stage_seconds.labels(stage)
        for reason in REJECTED:
            self.rejected.labels(reason)
        for damage in LOAD_FAILURES:
            self.load_failures.labels(damage)
        for dropped in DROPPED:
            self.novelties_dropped.labels(dropped)
        self._served: deque[str] = deque(maxlen=KEPT_VERSIONS)  # the versions that have series, last used last
        self._clients: set[str] = set()
        self._serving = 0  # the version that answers; 0: nothing is learned, and no score means anything

    def predicted(self, outcome: str, version: int, client: str, calibrated_score: float | None = None) -> None:
        """One image was answered."""
        label = self._version(version)
        self._clients.add(client)
        self.predictions.labels(outcome, label, client).inc()
        if calibrated_score is not None:
            self.calibrated_score.labels(label).observe(calibrated_score)
            if version and version == self._serving:
                self._drift.observe(calibrated_score)

    def serving(self, version: int, sha256: str, reference_points: int = 0) -> None:
        """Another version answers from now on."""
        self._serving = version
        self._drift.reset()
        self.reference_points.set(reference_points)
        self.model_info.clear()
        self.model_info.labels(self._version(version), sha256).set(1)

    def _version(self, version: int) -> str:
        label = str(version)
        if self._served and self._served[-1] == label:
            return label
        if label in self._served:
            self._served.remove(label)
        elif len(self._served) == KEPT_VERSIONS:
            self._forget(self._served[0])
        self._served.append(label)
        return label

    def _forget(self, version: str) -> None:
        for client in self._clients:
            for outcome in OUTCOMES:
                self.predictions.remove(outcome, version, client)
        self.calibrated_score.remove(version)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _DriftCollector(Collector):
    """The index is absent, not NaN, while there are too few scores.

    What is absent fires no alert and falls out of sums and averages over the replicas, which a NaN would spoil;
    Prometheus ends the series at the next scrape, so that after a swap nobody sees the index of the version before.
    """

    def __init__(self, drift: ScoreDrift) -> None:
        self._drift = drift

    def collect(self) -> Iterator[Metric]:
        index = GaugeMetricFamily(
            "openworld_score_drift_psi",
            "Population stability index of the calibrated scores against the uniform; absent while they are too few",
        )
        if (value := self._drift.index) is not None:
            index.add_metric([], value)
        yield index
        yield GaugeMetricFamily(
            "openworld_score_drift_samples", "Scores that the index is taken over", value=self._drift.samples
        )
