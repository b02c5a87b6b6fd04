"""The last 15 minutes of this server in intervals of 5 seconds: traffic, novelty, latency, scores and swaps.

A sampler reads the counters of `Metrics` and stores their increase per interval. Memory is
bounded, whatever the traffic. Prometheus itself keeps longer histories.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample

from service.inference.active_version import ActiveVersion
from service.inference.metrics import QUANTILES, REQUEST_SECONDS, Metrics
from service.wire.health import PulseAnswer, PulseBucket
from service.wire.times import utc_time

SECONDS = 5
INTERVALS = 180

SCORE_BOUNDS = [str(bound) for bound in QUANTILES]
LATENCY_BOUNDS = [*(str(bound) for bound in REQUEST_SECONDS), "+Inf"]

Series = tuple[str, ...]  # a metric's name and the values of its labels


@dataclass
class _Interval:
    number: int  # of 5-second steps of the monotonic clock
    increases: Counter[Series]  # of each metric, by outcome or by the upper bound of a histogram bucket


class Pulse:
    """Samples and reads on the event loop only, so it needs no lock."""

    def __init__(
        self,
        metrics: Metrics,
        active_version: ActiveVersion,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._metrics, self._active_version, self._clock, self._wall_clock = metrics, active_version, clock, wall_clock
        self._intervals: deque[_Interval] = deque(maxlen=INTERVALS)  # those with traffic
        self._totals = self._read_totals()
        self._sampled_at = clock()

    async def run(self) -> None:
        """Sample at the end of every interval, until cancelled."""
        while True:
            await asyncio.sleep(SECONDS - self._clock() % SECONDS)
            self.sample()

    def sample(self) -> None:
        """Add the increase since the last sample to the interval of that sample."""
        before, self._totals = self._totals, self._read_totals()
        increases: Counter[Series] = Counter()
        for (metric, *labels), total in self._totals.items():
            # The series of a version may have been dropped and started again, at zero.
            last = before.get((metric, *labels), 0.0)
            if increase := int(total - last if total >= last else total):
                increases[metric, labels[0]] += increase
        number = int(self._sampled_at // SECONDS)
        self._sampled_at = self._clock()
        if not increases:
            return
        if self._intervals and number == self._intervals[-1].number:
            self._intervals[-1].increases += increases
        else:
            self._intervals.append(_Interval(number, increases))

    def _read_totals(self) -> dict[Series, float]:
        """All totals since the server started: images by outcome, scores and latencies by histogram bucket."""
        totals: dict[Series, float] = {}
        for sample in _samples(self._metrics.predictions):
            labels = sample.labels
            totals["images", labels["outcome"], labels["version"], labels["client"]] = sample.value
        for sample in _samples(self._metrics.calibrated_score):
            if sample.name.endswith("_bucket") and sample.labels["version"] != "0":  # 0 has no meaningful scores
                totals["score", sample.labels["le"], sample.labels["version"]] = sample.value
        for sample in _samples(self._metrics.answer_seconds):
            if sample.name.endswith("_bucket"):
                totals["latency", sample.labels["le"]] = sample.value
        return totals

    def read(self, minutes: int = INTERVALS * SECONDS // 60) -> PulseAnswer:
        """The last minutes, until now."""
        self.sample()
        now = self._clock()
        first = int(now // SECONDS) - minutes * 60 // SECONDS + 1
        # Whole intervals, so that the times of an interval are the same in every answer until the clock is set.
        wall = round((self._wall_clock() - now) / SECONDS) * SECONDS
        begin = utc_time(first * SECONDS + wall)
        intervals = [interval for interval in self._intervals if interval.number >= first]
        total: Counter[Series] = sum((interval.increases for interval in intervals), Counter())
        cumulative = [0, *(total["score", bound] for bound in SCORE_BOUNDS)]
        return PulseAnswer(
            now=utc_time(self._wall_clock()),
            seconds=SECONDS,
            version=self._active_version.model.version,
            since=self._active_version.since,
            **_figures(total),
            scores=[high - low for low, high in itertools.pairwise(cumulative)],
            buckets=[
                PulseBucket(time=utc_time(one.number * SECONDS + wall), **_figures(one.increases)) for one in intervals
            ],
            swaps=[swap for swap in self._active_version.swaps if swap.time >= begin],
        )


def _samples(metric: MetricWrapperBase) -> list[Sample]:
    return [sample for family in metric.collect() for sample in family.samples]


def _figures(increases: Counter[Series]) -> dict[str, Any]:
    latencies = [increases["latency", bound] for bound in LATENCY_BOUNDS]
    return {
        "known": increases["images", "known"],
        "novel": increases["images", "novel"],
        "errors": increases["images", "error"],
        "p50": quantile(latencies, 0.5),
        "p99": quantile(latencies, 0.99),
    }


def quantile(cumulative: Sequence[int], share: float) -> float | None:
    """The latency that this share of the answers stays below, interpolated within its bucket as Prometheus does.

    `cumulative` counts the answers up to each bound of `LATENCY_BOUNDS`. None without answers.
    """
    rank = share * cumulative[-1]
    if not rank:
        return None
    low, below = 0.0, 0
    for high, count in zip(REQUEST_SECONDS, cumulative, strict=False):
        if count >= rank:
            return float(f"{low + (high - low) * (rank - below) / (count - below):.3g}")
        low, below = high, count
    return low
