"""The accuracy benchmark: metrics, intervals, baselines and priors, on data that can be computed by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

from benchmarks.accuracy import baselines
from benchmarks.accuracy.bootstrap import Outcomes, half_width, interval
from benchmarks.accuracy.cells import PRIORS
from benchmarks.accuracy.checks import acceptance
from benchmarks.accuracy.metrics import Step, calibration_error, false_positive_rate, measure, theorem_1
from benchmarks.accuracy.prior import Version, fit_novelty_prior, fit_rule_prior, priors
from benchmarks.accuracy.refined_prior import mean_distance
from models.inference.novelty import FROZEN_SUMMARIES, REFINED_SUMMARIES, SUMMARIES
from models.inference.rules import TERMS
from trainer.learning.gate import auc
from trainer.learning.prior import Prior

Floats = NDArray[np.float64]

# Two tasks of two classes: one image per class, a second one of the first class, and one of a class never learned.
LABELS = np.array([0, 1, 2, 3, 0, -1])
FIRST = np.log(np.array([[8, 1], [2, 7], [6, 1], [3, 3.5], [5, 1], [1, 2]]))
SECOND = np.log(
    np.array(
        [
            [8.0, 1, 2, 1],  # right
            [4, 3, 1, 1],  # right task, wrong class
            [1, 1, 6, 2],  # right
            [1, 9, 2, 3],  # wrong task, right class within the task
            [2, 1, 1, 5],  # wrong task, right class within the task
            [1, 1, 5.5, 1],  # never learned
        ]
    )
)


def steps() -> list[Step]:
    flagged = np.array([False, False, True, True, True, False])
    first = Step(FIRST, np.array([0, 0]), FIRST.max(axis=1), flagged, np.array([0.0, 0, 1, 1, 1, 1]), 0.9, None, 2.0)
    second = Step(SECOND, np.array([0, 0, 1, 1]), SECOND.max(axis=1))
    return [first, second]


def test_metrics_of_a_small_run_match_hand_computed_values() -> None:
    result = measure(steps(), LABELS)
    assert result.accuracy == [1.0, pytest.approx(2 / 5)]
    # Known: 8, 7, 5 against 6, 3.5, 2: 8 of 9 pairs are in order. Then 8, 4, 6, 9, 5 against 5.5: 3 of 5.
    assert result.auc == [pytest.approx(8 / 9), pytest.approx(3 / 5)]
    assert result.rejected == [pytest.approx(1 / 3), None]
    assert result.flagged == [pytest.approx(2 / 3), None]
    assert result.forgetting == pytest.approx(1 - 1 / 3)
    assert result.within_task == pytest.approx(4 / 5)
    assert result.task_prediction == pytest.approx(3 / 5)
    figures = result.figures()
    assert figures["last"] == pytest.approx(0.4)
    assert figures["aia"] == pytest.approx(0.7)
    assert figures["ai_auc"] == pytest.approx((8 / 9 + 3 / 5) / 2)
    assert figures["seconds"] == 2.0
    assert figures["self_auc"] is figures["auc_where_reported"] is None


def test_a_stream_without_unknown_classes_has_no_auc_after_its_last_task() -> None:
    result = measure([Step(step.log_scores[:5], step.task_of_class, step.novelty[:5]) for step in steps()], LABELS[:5])
    assert result.auc[1] is result.fpr95[1] is None
    assert result.figures()["ai_auc"] == result.auc[0]


def test_the_false_positive_rate_is_that_of_the_threshold_which_accepts_95_percent() -> None:
    known = np.arange(100.0)
    assert false_positive_rate(known, np.array([3.0, 4.0, 50.0, -1.0])) == pytest.approx(0.5)
    assert false_positive_rate(known, np.zeros(0)) is None


def test_the_calibration_error_weighs_known_and_novel_images_equally() -> None:
    known = np.array([True] * 8 + [False] * 2)
    assert calibration_error(np.where(known, 0.0, 1.0), known) == pytest.approx(0.0)
    assert calibration_error(np.full(10, 0.5), known) == pytest.approx(0.0)  # half of the weight is novel
    assert calibration_error(np.full(10, 0.9), known) == pytest.approx(0.4)
    assert calibration_error(np.full(8, 0.9), known[:8]) is None


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(1, 8),
    st.sampled_from([0.1, 5.0, 1000.0]),
)
def test_theorem_1_holds_for_any_scores(seed: int, counts: list[int], images: int, scale: float) -> None:
    rng = np.random.default_rng(seed)
    tasks = np.repeat(np.arange(len(counts)), counts)
    found = theorem_1(rng.normal(0, scale, (images, len(tasks))), tasks, rng.integers(0, len(tasks), images))
    assert found["largest_relative_gap"] < 1e-9
    assert min(found["h_wp"], found["h_tp"]) >= -1e-9


def outcomes(seed: int, shift: float) -> Outcomes:
    rng = np.random.default_rng(seed)
    known = np.arange(200) < 100
    novelty = (rng.normal(size=(2, 200)) + shift * known).astype(np.float32)
    return Outcomes(rng.random(200) < 0.5 + shift / 10, novelty, np.stack([known, known]))


def test_an_interval_contains_zero_only_for_methods_that_do_not_differ() -> None:
    good, bad = [outcomes(seed, 3.0) for seed in (0, 1)], [outcomes(seed, 0.5) for seed in (2, 3)]
    for figure in ("last", "ai_auc"):
        point, low, high = interval(good, bad, figure, replicates=100)
        assert 0 < low <= point <= high
        assert interval(good, good, figure, replicates=20) == (0.0, 0.0, 0.0)
    expected = np.mean([auc(row[:100], row[100:]) for row in good[0].novelty])
    assert good[0].ai_auc(np.ones(200)) == pytest.approx(expected)
    assert 0 < half_width(good[0], "last", replicates=100) < 0.15


def separated(classes: int = 4, per_class: int = 12) -> tuple[Floats, NDArray[np.int64], Floats, NDArray[np.int64]]:
    """Training and test features of well separated classes; the last test class is not learned."""
    rng = np.random.default_rng(0)
    means = rng.normal(0, 3, (classes + 1, 16))
    labels = np.repeat(np.arange(classes + 1), per_class)
    train, test = (means[labels] + rng.normal(0, 0.5, (len(labels), 16)) for _ in range(2))
    return train[labels < classes], labels[labels < classes], test, labels


@pytest.mark.parametrize("name", ["slda", "ncm", "ranpac", "knn"])
def test_a_baseline_separates_classes_and_scores_other_images_lower(name: str) -> None:
    train, labels, test, truth = separated()
    scores = getattr(baselines, name)(train, labels, 4, test)
    known = truth < 4
    assert (scores.classes.argmax(axis=1) == truth)[known].mean() > 0.95
    assert (auc(scores.novelty[known], scores.novelty[~known]) or 0) > 0.9


def test_logistic_regression_separates_classes() -> None:
    train, labels, test, truth = separated()
    logits = baselines.logistic(train, labels, 4, test[truth < 4], baselines.joint_penalty(train, labels, 4))
    assert (logits.argmax(axis=1) == truth[truth < 4]).mean() > 0.95


def test_the_ridge_penalty_is_the_best_of_images_left_out_one_at_a_time() -> None:
    rng = np.random.default_rng(1)
    h, target = rng.normal(size=(20, 6)), rng.normal(size=(20, 2))

    def fit(rows: NDArray[np.int64], penalty: float) -> Floats:
        found: Floats = np.linalg.solve(h[rows].T @ h[rows] + penalty * np.eye(6), h[rows].T @ target[rows])
        return found

    def error(penalty: float) -> float:
        rest = [np.delete(np.arange(20), i) for i in range(20)]
        return float(np.mean([(target[i] - h[i] @ fit(rest[i], penalty)) ** 2 for i in range(20)]))

    best = min(baselines.RIDGE_PENALTIES * np.trace(h.T @ h) / 6, key=error)
    np.testing.assert_allclose(baselines.ridge(h, target), fit(np.arange(20), best), atol=1e-9)


def version(rng: np.random.Generator, useful_term: int, useful_summary: int) -> Version:
    terms = rng.normal(size=(200, 4, len(TERMS))).astype(np.float32)
    columns = terms[:, :, useful_term].argmax(axis=1)
    known = np.arange(200) < 120
    summaries = rng.normal(size=(200, len(FROZEN_SUMMARIES)))
    summaries[:, useful_summary] += 3.0 * known
    return Version(terms, columns, summaries, known)


def test_a_prior_puts_its_weight_on_the_evidence_that_decides() -> None:
    rng = np.random.default_rng(0)
    found = [version(rng, 3, 1) for _ in range(3)]
    rule, novelty = fit_rule_prior(found), fit_novelty_prior(found)
    assert rule[TERMS[3]] > 10 * max(weight for name, weight in rule.items() if name != TERMS[3])
    others = [weight for name, weight in novelty.items() if name not in (SUMMARIES[1], "known")]
    assert novelty[SUMMARIES[1]] > 5 * max(others)
    assert min(*rule.values(), *others) >= 0


def test_the_prior_for_a_data_set_does_not_depend_on_its_images() -> None:
    one, other, changed = (
        [version(np.random.default_rng(seed), *useful)] for seed, useful in enumerate([(3, 1), (4, 2), (5, 0)])
    )
    before, after = priors({"a": one, "b": other}), priors({"a": changed, "b": other})
    assert before["without a"] == after["without a"]
    assert before["without b"] != after["without b"]
    assert set(before["all"]["novelty"]) == set(Prior().novelty)
    assert set(before["all"]["rule"]) == set(Prior().rule)


def test_the_distance_of_novel_images_is_from_the_line_of_known_ones() -> None:
    """Refined scores of 2 x + 1 for known images and of 2 x + 0.5 for novel ones, in two parts of equal weight."""
    frozen = np.array([0.0, 1.0, 2.0, 3.0, -1.0, -4.0])
    known = np.arange(6) < 4
    refined = 2 * frozen + np.where(known, 1.0, 0.5)
    rows = np.column_stack([frozen, refined, refined])
    version = Version(np.zeros((4, 2, 1), np.float32), np.zeros(4, int), rows, known)
    novelty = dict.fromkeys(REFINED_SUMMARIES, 0.5)
    assert mean_distance([version], novelty) == -0.5
    assert mean_distance([], novelty) == 0.0


@pytest.mark.skipif(not PRIORS.is_file(), reason="benchmarks.accuracy.prior has not been run")
def test_the_prior_of_the_product_is_that_of_all_data_sets() -> None:
    for name, computed in json.loads(Path(PRIORS).read_text())["priors"]["all"].items():
        assert getattr(Prior(), name) == pytest.approx(computed, abs=0.005)


def test_a_check_says_by_how_much_it_is_met_or_not() -> None:
    mean = {"last": 0.9, "ai_auc": 0.95, "flagged": 0.6, "self_accuracy": 0.91, "self_auc": None}
    mean["auc_where_reported"] = None
    others = {
        "paper": {"mean": {"last": 0.8, "ai_auc": 0.94}},
        "product-v1": {"mean": {"last": 0.895, "ai_auc": 0.90, "flagged": 0.5}},
    }
    results = [{"rejected": [0.03, 0.08]}, {"rejected": [0.05, 0.12]}]  # by class order, after each task
    table = {("set", 20): {"ours": {"mean": mean, "results": results}, **others}}
    checks = {check["text"]: check["met"] for check in acceptance(table, [])}
    assert checks["last accuracy ours - paper: +10.0 (bar +1)"]
    assert not checks["last accuracy ours - product-v1: +0.5 (bar +1)"]
    assert not checks["AI-AUC ours - paper: +1.0 (bar +2)"]
    assert checks["AI-AUC ours - product-v1: +5.0 (bar +4)"]
    assert checks["AI-AUC, mean over data sets: ours 95.0, then paper 94.0 (bar: ours is first)"]
    rejected = "known images rejected, farthest from 5 %:"
    assert not checks[f"{rejected} 7.0 % on set, 20 images per class (bar +-1.5)"]
    assert not checks[f"{rejected} 10.0 % on set, 20 images per class, after task 2 (bar +-4)"]
    assert not checks["share of novel images flagged, ours / product-v1: 1.20 (bar 1.5)"]
    assert checks["self-reported - measured accuracy, mean: +1.0 (bar 2)"]
    assert not any("novelty AUC" in text for text in checks)  # not defined


def test_a_deficit_on_one_data_set_counts_only_when_its_interval_excludes_zero() -> None:
    entry = {"data": "set", "per_class": 20, "figure": "last", "best_other": "slda", "difference": -0.02, "low": -0.04}
    for high, met in ((0.01, True), (-0.01, False)):
        (check,) = acceptance({}, [{**entry, "high": high}])
        assert check["text"].startswith("last accuracy ours - best other, least lead: -2.0 on set")
        assert check["met"] is met
