"""The pulse: increases of the metrics are counted exactly, dropped after 15 minutes, and bounded in memory."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.images import ImageLimits
from service.inference.metrics import KEPT_VERSIONS, QUANTILES, REQUEST_SECONDS, Metrics
from service.inference.pulse import INTERVALS, SECONDS, Pulse, quantile
from service.inference.servable import EmptyModel, ServableModel
from service.wire.health import PulseAnswer, Swap

START = 1_700_000_000.0


@dataclass
class Clock:
    now: float = START

    def __call__(self) -> float:
        return self.now


class Version(EmptyModel):
    def __init__(self, version: int) -> None:
        super().__init__(ImageLimits())
        self.version = version


@dataclass
class FakeActiveVersion:
    model: ServableModel = field(default_factory=lambda: Version(3))
    since: datetime = field(default_factory=lambda: datetime.fromtimestamp(START, UTC))
    swaps: list[Swap] = field(default_factory=list)

    def swap(self, version: int, at: float) -> None:
        self.since = datetime.fromtimestamp(at, UTC)
        self.swaps.append(Swap(time=self.since, previous=self.model.version, version=version))
        self.model = Version(version)


@dataclass
class Server:
    """The metrics of a server and its pulse, without the server."""

    metrics: Metrics = field(default_factory=Metrics)
    active: Any = field(default_factory=FakeActiveVersion)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.jump = 0.0  # of the wall clock
        self.pulse = Pulse(self.metrics, self.active, self.clock, lambda: self.clock.now + self.jump)

    def answer(self, *outcomes: str, version: int = 3, score: float = 0.5, seconds: float = 0.01) -> None:
        """One request with these outcomes."""
        for outcome in outcomes:
            self.metrics.count_prediction(outcome, version, "robot", None if outcome == "error" else score)
        self.metrics.count_request("/predict", 200, seconds)

    def step(self) -> None:
        """Let one interval pass."""
        self.clock.now += SECONDS
        self.pulse.sample()


def counts(pulse: Pulse, minutes: int = 15) -> tuple[int, int, int]:
    read = pulse.read(minutes)
    return read.known, read.novel, read.errors


def test_images_are_counted_by_outcome() -> None:
    server = Server()
    server.answer("known", "novel", "error", "known")
    server.answer("novel")
    server.answer("error", "error", "error")
    read = server.pulse.read()
    assert (read.known, read.novel, read.errors) == (2, 2, 4)
    assert len(read.buckets) == 1
    assert read.buckets[0].time.timestamp() == START // SECONDS * SECONDS


def test_a_read_between_two_samples_counts_nothing_twice() -> None:
    server = Server()
    server.answer("known")
    assert counts(server.pulse) == counts(server.pulse) == (1, 0, 0)
    server.answer("known")
    server.step()
    assert counts(server.pulse) == (2, 0, 0)


def test_what_happened_before_the_pulse_started_is_not_counted() -> None:
    metrics = Metrics()
    metrics.count_prediction("known", 3, "robot", 0.5)
    assert counts(Server(metrics).pulse) == (0, 0, 0)


def test_every_five_seconds_have_a_bucket_and_a_window_has_its_own_sums() -> None:
    server = Server()
    for _ in range(30):
        server.answer("known")
        server.step()
    assert len(server.pulse.read().buckets) == 30
    assert counts(server.pulse) == (30, 0, 0)
    # The interval of this moment is empty, and is one of the twelve of the last minute.
    assert counts(server.pulse, minutes=1) == (11, 0, 0)


def test_a_late_sample_counts_for_the_interval_in_which_it_was_due() -> None:
    server = Server()
    server.answer("known")
    server.clock.now += SECONDS + 1.5
    server.pulse.sample()
    assert [bucket.time.timestamp() for bucket in server.pulse.read().buckets] == [START // SECONDS * SECONDS]


def test_after_fifteen_minutes_everything_is_dropped() -> None:
    server = Server()
    server.answer("known")
    server.pulse.sample()
    server.clock.now += (INTERVALS - 1) * SECONDS
    assert counts(server.pulse) == (1, 0, 0)
    server.clock.now += SECONDS
    assert counts(server.pulse) == (0, 0, 0)
    assert server.pulse.read().p50 is None


def test_it_never_holds_more_than_it_shows() -> None:
    server = Server()
    for _ in range(3 * INTERVALS):
        server.answer("known", "known")
        server.step()
    assert len(server.pulse._intervals) == INTERVALS
    assert counts(server.pulse) == (2 * (INTERVALS - 1), 0, 0)


@pytest.mark.parametrize("jump", [-60.0, 31 * 86400.0])
def test_a_clock_that_is_set_changes_only_the_shown_times(jump: float) -> None:
    server = Server()
    server.answer("known")
    server.step()
    before = [bucket.time.timestamp() for bucket in server.pulse.read().buckets]
    server.jump = jump
    assert counts(server.pulse) == (1, 0, 0)
    assert [bucket.time.timestamp() for bucket in server.pulse.read().buckets] == [time + jump for time in before]
    server.answer("known")
    server.step()
    assert counts(server.pulse, minutes=1) == (2, 0, 0)


def test_versions_whose_series_were_dropped_and_made_again_are_counted_on() -> None:
    """`Metrics` drops the series of a version that did not answer for a while; a new series starts at zero."""
    server = Server()
    for version in (1, *range(2, 2 + KEPT_VERSIONS), 1):
        server.answer("known", "known", version=version)
        server.step()
    assert counts(server.pulse) == (2 * (KEPT_VERSIONS + 2), 0, 0)
    assert sum(server.pulse.read().scores) == 2 * (KEPT_VERSIONS + 2)


def test_scores_fall_into_twenty_bins_and_those_of_version_0_into_none() -> None:
    server = Server()
    for score in (0.0, 0.049, 0.05, 0.0501, 0.999, 1.0):
        server.answer("known", score=score)
    server.answer("novel", version=0, score=0.0)
    assert server.pulse.read().scores == [3, 1, *[0] * 17, 2]


@given(st.lists(st.floats(0, 1), max_size=50))
def test_every_score_is_in_the_bin_that_its_upper_bound_closes(scores: list[float]) -> None:
    server = Server()
    for score in scores:
        server.answer("known", score=score)
    bins = [bisect_left(QUANTILES, score) for score in scores]
    assert server.pulse.read().scores == [bins.count(place) for place in range(len(QUANTILES))]


def test_swaps_are_listed_while_they_are_in_the_window() -> None:
    server = Server()
    assert server.pulse.read().swaps == []
    server.active.swap(4, START + 7)
    server.active.swap(3, START + 70)
    server.active.swap(5, START + 80)
    server.clock.now += 80
    read: PulseAnswer = server.pulse.read()
    assert [(one.previous, one.version) for one in read.swaps] == [(3, 4), (4, 3), (3, 5)]
    assert (read.version, read.since) == (5, server.active.since)
    server.clock.now = START + 960
    assert [one.version for one in server.pulse.read().swaps] == [3, 5]


@given(st.lists(st.floats(2e-4, 29), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_in_the_histogram_bucket_of_the_true_one(seconds: list[float], share: float) -> None:
    cumulative = [sum(one <= bound for one in seconds) for bound in (*REQUEST_SECONDS, np.inf)]
    found = quantile(cumulative, share)
    true = float(np.quantile(seconds, share, method="inverted_cdf"))
    place = bisect_left(REQUEST_SECONDS, true)
    assert found is not None
    low, high = REQUEST_SECONDS[place - 1] if place else 0.0, REQUEST_SECONDS[place]
    assert low * 0.995 <= found <= high * 1.005  # rounded to three digits


def test_buckets_are_fine_enough_for_quantiles() -> None:
    assert all(high / low < 1.7 for low, high in itertools.pairwise(REQUEST_SECONDS))


def test_requests_that_were_not_answered_do_not_change_the_latency() -> None:
    server = Server()
    server.answer("known", seconds=0.2)
    answered = server.pulse.read()
    for status in (401, 415, 429, 499, 503):
        server.metrics.count_request("/predict", status, 0.001)
    server.metrics.count_request("/livez", 200, 0.001)
    assert answered.p50 is not None
    assert server.pulse.read() == answered


def test_latencies_beyond_both_ends_are_kept_at_the_ends() -> None:
    server = Server()
    server.answer(seconds=0.0)
    server.answer(seconds=1e6)
    read = server.pulse.read()
    assert (read.known, read.novel, read.errors) == (0, 0, 0)
    assert read.p50 is not None
    assert 0 < read.p50 <= REQUEST_SECONDS[0]
    assert read.p99 == REQUEST_SECONDS[-1]
    assert [(bucket.p50, bucket.p99) for bucket in read.buckets] == [(read.p50, read.p99)]
