"""The pulse: what was answered lately is counted exactly, forgotten in time, and never grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.images import ImageLimits
from service.inference.servable import EmptyModel, ServableModel
from service.routes.pulse import BINS, EDGES, KEPT, SECONDS, SWAPS, Pulse, quantile
from service.wire.predictions import Failure, ImageProblem, Prediction
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server

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
class Serving:
    model: ServableModel = field(default_factory=lambda: Version(3))
    since: datetime = field(default_factory=lambda: datetime.fromtimestamp(START, UTC))

    def swap(self, version: int, at: float) -> None:
        self.model, self.since = Version(version), datetime.fromtimestamp(at, UTC)


def prediction(novel: bool = False, calibrated: float = 0.5, score: float | None = -1.0) -> Prediction:
    return Prediction(
        id="1",
        label=None if novel else "apple",
        novel=novel,
        score=score,
        calibrated_score=calibrated,
        p_novel=0.1,
        task=0,
        nearest=[],
        version=3,
    )


FAILED = Failure(error=ImageProblem(code="broken_image", detail="cut short"))


def counts(pulse: Pulse, minutes: int = 15) -> tuple[int, int, int]:
    read = pulse.read(minutes)
    return read.known, read.novel, read.errors


def test_images_are_counted_by_what_they_were_answered() -> None:
    pulse = Pulse(Serving(), Clock())
    pulse.answered([prediction(), prediction(novel=True), FAILED, prediction()], 0.01)
    pulse.answered([prediction(novel=True)], 0.01)
    pulse.unreadable(3)
    read = pulse.read()
    assert (read.known, read.novel, read.errors) == (2, 2, 4)
    assert len(read.buckets) == 1
    assert read.buckets[0].time.timestamp() == START // SECONDS * SECONDS


def test_every_five_seconds_have_a_bucket_and_a_window_has_its_own_sums() -> None:
    clock = Clock()
    pulse = Pulse(Serving(), clock)
    for _ in range(30):
        pulse.answered([prediction()], 0.01)
        clock.now += SECONDS
    assert len(pulse.read().buckets) == 30
    assert counts(pulse) == (30, 0, 0)
    # The bucket of this very moment is empty, and is one of the twelve of the last minute.
    assert counts(pulse, minutes=1) == (11, 0, 0)


def test_after_fifteen_minutes_all_is_forgotten() -> None:
    clock = Clock()
    pulse = Pulse(Serving(), clock)
    pulse.answered([prediction()], 0.01)
    clock.now += (KEPT - 1) * SECONDS
    assert counts(pulse) == (1, 0, 0)
    clock.now += SECONDS
    assert counts(pulse) == (0, 0, 0)
    assert pulse.read().p50 is None


def test_it_never_holds_more_than_it_shows() -> None:
    clock, serving = Clock(), Serving()
    pulse = Pulse(serving, clock)
    for step in range(3 * KEPT):
        serving.swap(step, clock.now)
        pulse.answered([prediction()] * 2, 0.01)
        clock.now += SECONDS
    assert len(pulse._buckets) == KEPT
    assert len(pulse._swaps) == SWAPS
    assert counts(pulse) == (2 * (KEPT - 1), 0, 0)


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    clock = Clock()
    pulse = Pulse(Serving(), clock)
    pulse.answered([prediction()], 0.01)
    clock.now -= 60
    pulse.answered([prediction()], 0.01)
    clock.now += 60
    assert counts(pulse) == (2, 0, 0)


def test_scores_fall_into_twenty_bins_and_those_of_nothing_into_none() -> None:
    pulse = Pulse(Serving(), Clock())
    pulse.answered([prediction(calibrated=score) for score in (0.0, 0.049, 0.05, 0.999, 1.0)], 0.01)
    pulse.answered([prediction(novel=True, calibrated=0.0, score=None)], 0.01)
    assert pulse.read().scores == [2, 1, *[0] * (BINS - 3), 2]


def test_a_swap_is_noticed_with_its_time_by_whoever_looks_first() -> None:
    clock, serving = Clock(), Serving()
    pulse = Pulse(serving, clock)
    assert pulse.read().swaps == []
    serving.swap(4, START + 7)
    clock.now += 60
    (swap,) = pulse.read().swaps
    assert (swap.previous, swap.version, swap.time.timestamp()) == (3, 4, START + 7)
    serving.swap(3, START + 70)
    pulse.answered([prediction()], 0.01)
    serving.swap(5, START + 80)
    read = pulse.read()
    assert [(one.previous, one.version) for one in read.swaps] == [(3, 4), (4, 3), (3, 5)]
    assert (read.version, read.since) == (5, serving.since)
    clock.now += 900
    assert [one.version for one in pulse.read().swaps] == [3, 5]


@given(st.lists(st.floats(2e-4, 60), min_size=1, max_size=300), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_is_within_a_bin_of_the_true_one(seconds: list[float], share: float) -> None:
    pulse = Pulse(Serving(), Clock())
    for one in seconds:
        pulse.answered([], one)
    found = quantile(pulse._buckets[0].latencies, share)
    true = float(np.quantile(seconds, share, method="inverted_cdf"))
    assert found == pytest.approx(true, rel=0.16)


def test_latencies_beyond_both_ends_are_kept_at_the_ends() -> None:
    pulse = Pulse(Serving(), Clock())
    pulse.answered([], 0.0)
    pulse.answered([], 1e6)
    assert pulse.read().p50 == pytest.approx(EDGES[0], rel=0.01)
    assert pulse.read().p99 == pytest.approx(EDGES[-1], rel=0.01)


# The real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Any:
    data = learned_folder(tmp_path_factory.mktemp("pulse") / "robot")
    with running_server(data, threads=1) as running:
        yield running


def test_traffic_on_the_real_server_is_counted_to_the_last_image(server: RunningServer) -> None:
    before = server.get("/pulse").json()
    answers = [server.post("/predict", content=known_image(f"class {n % 5}", n)).json() for n in range(10)]
    answers += [server.post("/predict", content=novel_image(n)).json() for n in range(5)]
    several = [("images", known_image("class 0")), ("images", b"none"), ("images", novel_image(9))]
    answers.append(server.post("/predict", files=several).json())
    assert server.post("/predict", content=b"no image").status_code == 415
    broken = [("images", b"none"), ("images", known_image("class 0")[:50])]
    assert server.post("/predict", files=broken).status_code == 415
    assert server.post("/predict?version=99", content=known_image("class 0")).status_code == 404  # nothing was answered

    entries = [entry for answer in answers for entry in answer["predictions"]]
    novel = sum(entry.get("novel", False) for entry in entries)
    read = server.get("/pulse").json()
    assert before["known"] + before["novel"] + before["errors"] == 0
    assert (read["known"], read["novel"], read["errors"]) == (17 - novel, novel, 1 + 1 + 2)
    assert sum(read["scores"]) == 17
    bins = [min(int(entry["calibrated_score"] * BINS), BINS - 1) for entry in entries if "id" in entry]
    assert read["scores"] == [bins.count(place) for place in range(BINS)]
    assert sum(bucket["known"] + bucket["novel"] for bucket in read["buckets"]) == 17
    assert 0 < read["p50"] <= read["p99"] < 10
    assert [(swap["previous"], swap["version"]) for swap in read["swaps"]] == [(0, 3)]


def test_a_roll_back_is_marked(server: RunningServer) -> None:
    assert server.post("/versions/2/activate").status_code == 200
    read = server.get("/pulse").json()
    assert (read["version"], read["swaps"][-1]["previous"], read["swaps"][-1]["version"]) == (2, 3, 2)
    assert read["swaps"][-1]["time"] == read["since"]


@pytest.mark.parametrize("minutes", ["0", "16", "x"])
def test_a_window_that_is_not_kept_is_refused(server: RunningServer, minutes: str) -> None:
    assert server.get(f"/pulse?minutes={minutes}").json()["code"] == "invalid"


def test_only_holders_of_a_key_may_watch(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1, keys="a:predict:aaaaaaaa-secret-of-a-robot") as server:
        assert server.get("/pulse").status_code == 401
        assert server.get("/pulse", headers={"X-API-Key": "aaaaaaaa-secret-of-a-robot"}).status_code == 200
