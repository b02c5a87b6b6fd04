"""The last fifteen minutes of this server, for people who watch it: traffic, novelty, latency, scores, swaps.

In memory and bounded: 180 buckets of five seconds, each with counts and two histograms, whatever the traffic.
Prometheus keeps what should be kept for longer.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Annotated, Protocol

from fastapi import APIRouter, Query, Request

from service.http.auth import AnyKey
from service.http.problems import documented
from service.inference.servable import ServableModel
from service.wire.health import PulseAnswer, PulseBucket, Swap
from service.wire.predictions import Failure, Prediction

router = APIRouter(tags=["people"])

SECONDS, KEPT, BINS, SWAPS = 5, 180, 20, 64
# A tenth of a millisecond to two minutes, 15 % apart: a quantile is off by half of that, and bins can be added up.
EDGES = tuple(1e-4 * 1.15**step for step in range(100))


@dataclass
class _Bucket:
    number: int  # of five-second steps since the epoch
    known: int = 0
    novel: int = 0
    errors: int = 0
    latencies: list[int] = field(default_factory=lambda: [0] * (len(EDGES) + 1))
    scores: list[int] = field(default_factory=lambda: [0] * BINS)


class Serving(Protocol):
    """What answers and since when; as `ActiveVersion` has them."""

    model: ServableModel
    since: datetime


class Pulse:
    """Fed and read on the event loop only, so that nothing here needs a lock."""

    def __init__(self, serving: Serving, clock: Callable[[], float] = time.time) -> None:
        self._serving, self._clock = serving, clock
        self._buckets: deque[_Bucket] = deque(maxlen=KEPT)
        self._version = serving.model.version
        self._swaps: deque[Swap] = deque(maxlen=SWAPS)

    def answered(self, predictions: Iterable[Prediction | Failure], seconds: float) -> None:
        """A request has its answer."""
        bucket = self._bucket()
        bucket.latencies[bisect_right(EDGES, seconds)] += 1
        for one in predictions:
            if isinstance(one, Failure):
                bucket.errors += 1
                continue
            bucket.novel += one.novel
            bucket.known += not one.novel
            if one.score is not None:  # while nothing is learned, a score says nothing
                bucket.scores[min(int(one.calibrated_score * BINS), BINS - 1)] += 1

    def unreadable(self, images: int) -> None:
        """A request of which not one image could be read."""
        self._bucket().errors += images

    def read(self, minutes: int = KEPT * SECONDS // 60) -> PulseAnswer:
        self._notice()
        now = self._clock()
        first = int(now // SECONDS) - minutes * 60 // SECONDS + 1
        buckets = [bucket for bucket in self._buckets if bucket.number >= first]
        begin = _time(first * SECONDS)
        latencies = _sum([bucket.latencies for bucket in buckets], len(EDGES) + 1)
        return PulseAnswer(
            now=_time(now),
            seconds=SECONDS,
            version=self._version,
            since=self._serving.since,
            known=sum(bucket.known for bucket in buckets),
            novel=sum(bucket.novel for bucket in buckets),
            errors=sum(bucket.errors for bucket in buckets),
            p50=quantile(latencies, 0.5),
            p99=quantile(latencies, 0.99),
            scores=_sum([bucket.scores for bucket in buckets], BINS),
            buckets=[_beat(bucket) for bucket in buckets],
            swaps=[swap for swap in self._swaps if swap.time >= begin],
        )

    def _bucket(self) -> _Bucket:
        self._notice()
        number = int(self._clock() // SECONDS)
        # A clock that was set back goes on counting where it was: buckets stay in order.
        if not self._buckets or number > self._buckets[-1].number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]

    def _notice(self) -> None:
        """Nobody tells of a swap, so it is looked for whenever something happens."""
        version = self._serving.model.version
        if version != self._version:
            self._swaps.append(Swap(time=self._serving.since, previous=self._version, version=version))
            self._version = version


def quantile(counts: Sequence[int], share: float) -> float | None:
    """The latency that this share of the requests stayed under: the middle of its bin, on the logarithmic scale."""
    rank, seen = share * sum(counts), 0
    for place, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            low, high = EDGES[max(place - 1, 0)], EDGES[min(place, len(EDGES) - 1)]
            return float(f"{(low * high) ** 0.5:.3g}")
    return None


def _sum(rows: Sequence[Sequence[int]], width: int) -> list[int]:
    return [sum(column) for column in zip(*rows, strict=True)] if rows else [0] * width


def _beat(bucket: _Bucket) -> PulseBucket:
    p50, p99 = quantile(bucket.latencies, 0.5), quantile(bucket.latencies, 0.99)
    return PulseBucket(
        time=_time(bucket.number * SECONDS),
        known=bucket.known,
        novel=bucket.novel,
        errors=bucket.errors,
        p50=p50,
        p99=p99,
    )


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def pulse_of(request: Request) -> Pulse:
    pulse: Pulse = request.app.state.pulse
    return pulse


@router.get("/pulse", summary="The last minutes: traffic, novelty, latency, scores", responses=documented(401, 422))
async def pulse(
    request: Request,
    key: AnyKey,
    minutes: Annotated[int, Query(ge=1, le=KEPT * SECONDS // 60, description="how far back")] = KEPT * SECONDS // 60,
) -> PulseAnswer:
    """Of this server alone, and since it started; Prometheus has the history of all."""
    return pulse_of(request).read(minutes)
