"""Score drift: the index, its window, and its export."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from models.inference.novelty import Novelty
from service.inference.drift import BINS, WINDOW_SECONDS, ScoreDrift, stability_index
from service.inference.metrics import Metrics
from tests.support.paths import ROOT
from tests.support.servers import known_image, learned_folder, metric_value, novel_image, running_server

LARGE = 0.25
COUNTS = st.lists(st.integers(0, 5000), min_size=2, max_size=40)
RULES = ROOT / "deploy" / "prometheus" / "rules" / "openworld.rules.yml"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def filled(scores: np.ndarray, window: int = 2000, minimum: int = 200) -> ScoreDrift:
    drift = ScoreDrift(window, minimum)
    for score in scores:
        drift.observe(float(score))
    return drift


def bins(scores: np.ndarray) -> list[int]:
    return list(np.histogram(scores, BINS, (0, 1))[0])


# The index


@given(COUNTS)
def test_the_index_is_finite_and_never_negative(counts: list[int]) -> None:
    index = stability_index(counts)
    assert index >= -1e-12
    assert math.isfinite(index)


@given(st.integers(0, 10_000), st.integers(2, 40))
def test_the_index_is_zero_for_uniform_counts(count: int, size: int) -> None:
    assert stability_index([count] * size) == pytest.approx(0, abs=1e-12)


@given(st.permutations(range(0, 400, 40)))
def test_the_order_of_the_bins_does_not_matter(counts: list[int]) -> None:
    assert stability_index(counts) == pytest.approx(stability_index(sorted(counts)))


@given(st.lists(st.integers(-10, 10), min_size=2, max_size=20), st.integers(0, 19))
def test_the_index_grows_with_the_distance_from_uniform(steps: list[int], last: int) -> None:
    steps[last % len(steps)] -= sum(steps)  # keep the sum
    if not any(steps):
        return
    room = 20 * max(abs(step) for step in steps)
    indices = [stability_index([room + far * step for step in steps]) for far in range(0, 21, 4)]
    assert all(nearer < farther for nearer, farther in itertools.pairwise(indices))


def test_the_index_matches_its_definition_for_large_counts() -> None:
    counts = [50_000 + 3_000 * place for place in range(BINS)]
    shares = np.array(counts) / sum(counts)
    assert stability_index(counts) == pytest.approx(stats.entropy(shares, [1 / BINS] * BINS)
                                                    + stats.entropy([1 / BINS] * BINS, shares), rel=1e-3)  # fmt: skip


@pytest.mark.parametrize(("share", "large"), [(0.0, False), (0.05, False), (0.3, True), (1.0, True)])
def test_a_share_of_novel_images_is_drift(share: float, large: bool) -> None:
    rng = np.random.default_rng(0)
    scores = np.where(rng.random(2000) < share, rng.random(2000) * 0.04, rng.random(2000))
    assert (stability_index(bins(scores)) > LARGE) is large


def test_lower_scores_of_known_images_are_drift_even_if_few_are_novel() -> None:
    scores = np.random.default_rng(0).beta(2, 6, 2000)
    assert (scores < 0.05).mean() < 0.1
    assert stability_index(bins(scores)) > LARGE


@pytest.mark.parametrize("held_out", [8, 20, 60, 256])
def test_the_alert_bound_covers_chance(held_out: int) -> None:
    """Traffic without drift rarely exceeds the alert's bound, and often exceeds 0.25 alone if the reference is small.

    Chi-square is the limit for large samples: with few images the 99th percentile is closer to the 95th.
    """
    assert f"{stats.chi2.ppf(0.99, BINS - 1):.0f} * (" in RULES.read_text()
    rng = np.random.default_rng(1)
    false = without_bound = 0
    for _ in range(400):
        reference = replace(Novelty.empty(), known=np.sort(rng.normal(size=held_out)))
        index = stability_index(bins(reference.calibrated(rng.normal(size=1000))))
        without_bound += index > LARGE
        false += index > max(LARGE, 22 * (1 / held_out + 1 / 1000))
    assert false / 400 < 0.05
    assert without_bound / 400 > 0.9 or held_out > 20


# The window


def test_there_is_no_index_below_the_minimum_number_of_scores() -> None:
    drift = filled(np.zeros(199), minimum=200)
    assert (drift.index, drift.samples) == (None, 199)
    drift.observe(0.0)
    assert drift.samples == 200
    assert drift.index is not None
    assert drift.index > 1


def test_a_full_window_drops_the_oldest_scores() -> None:
    drift = filled(np.concatenate([np.zeros(500), np.linspace(0, 0.999, 100)]), window=100, minimum=50)
    assert drift.samples == 100
    assert drift.index == pytest.approx(0, abs=1e-12)


def test_scores_are_dropped_after_an_hour_without_new_ones() -> None:
    clock = Clock()
    drift = ScoreDrift(minimum=2, clock=clock)
    for clock.now in (0.0, 60.0, 120.0):
        drift.observe(0.0)
    clock.now = WINDOW_SECONDS + 30
    assert drift.samples == 2
    assert drift.index == stability_index([2, *[0] * (BINS - 1)])
    clock.now = WINDOW_SECONDS + 90
    assert (drift.samples, drift.index) == (1, None)


@given(st.lists(st.floats(0, 1), max_size=60), st.integers(1, 30))
def test_the_window_contains_exactly_the_last_scores(scores: list[float], window: int) -> None:
    drift = filled(np.array(scores), window=window, minimum=1)
    last = scores[-window:]
    places = [min(int(score * BINS), BINS - 1) for score in last]
    assert drift.samples == len(last)
    assert drift.index == (stability_index([places.count(place) for place in range(BINS)]) if last else None)


@pytest.mark.parametrize("score", [math.nan, math.inf, -0.1, 1.1])
def test_a_score_outside_0_to_1_is_ignored(score: float) -> None:
    assert filled(np.array([score, 0.5])).samples == 1


# In the service


def exported(metrics: Metrics) -> tuple[float, bool]:
    """The exported number of scores, and whether an index is exported."""
    text = metrics.text().decode()
    return metric_value(text, "openworld_score_drift_samples"), "\nopenworld_score_drift_psi " in text


def test_a_swap_resets_the_window_and_the_index_is_absent() -> None:
    metrics = Metrics(ScoreDrift(minimum=3))
    metrics.set_active_version(1, "sha", 40)
    for _ in range(3):
        metrics.count_prediction("known", 1, "robot", 0.5)
    assert exported(metrics) == (3, True)
    metrics.set_active_version(2, "other", 50)
    assert exported(metrics) == (0, False)
    assert metric_value(metrics.text().decode(), "openworld_score_reference_points") == 50
    metrics.count_prediction("known", 1, "robot", 0.5)  # accepted before the swap, answered after it
    assert exported(metrics) == (0, False)


def test_answers_of_pinned_versions_and_of_version_0_do_not_count() -> None:
    metrics = Metrics(ScoreDrift(minimum=1))
    metrics.count_prediction("novel", 0, "robot", 0.0)
    metrics.set_active_version(2, "sha", 40)
    metrics.count_prediction("known", 1, "robot", 0.5)
    metrics.count_prediction("error", 2, "robot")
    assert exported(metrics) == (0, False)


def test_a_server_measures_known_and_novel_images_and_resets_at_an_activation(tmp_path: Path) -> None:
    settings = {"threads": 1, "inbox": "false", "drift_window": 100}
    with running_server(learned_folder(tmp_path / "robot"), **settings) as server:
        images = [*(known_image("class 0", number) for number in range(100, 106)), *(novel_image(n) for n in range(5))]
        files = [("images", (str(place), image)) for place, image in enumerate(images)]
        answers = server.post("/predict", files=files).json()["predictions"]
        assert {answer["novel"] for answer in answers} == {True, False}
        text = server.get("/metrics").text
        assert metric_value(text, "openworld_score_drift_samples") == 11
        expected = stability_index(bins(np.array([answer["calibrated_score"] for answer in answers])))
        assert metric_value(text, "openworld_score_drift_psi") == pytest.approx(expected)
        assert metric_value(text, "openworld_score_reference_points") > 0
        assert server.post("/versions/2/activate").status_code == 200
        assert server.metric("openworld_score_drift_samples") == 0
        assert "\nopenworld_score_drift_psi " not in server.get("/metrics").text
