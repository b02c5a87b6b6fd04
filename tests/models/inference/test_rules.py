"""Rules: the paper's equations, written again with probabilities, give the same scores."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.evidence import Evidence, Floats
from models.inference.rules import TERMS, Rule, term
from tests.support.evidence import class_counts, quick, random_evidence, seeds, with_parts


def algorithm_2(evidence: Evidence, image: int) -> Floats:
    """The pseudo-code of the paper for one image, with probabilities instead of their logarithms."""
    outputs: list[float] = []
    for logits, distances in zip(evidence.logits, evidence.distances, strict=True):
        exponentials = np.exp(logits[image])
        p = exponentials / exponentials.sum()  # `ood`, the last, is in the denominator
        s = max(1 / md for md in distances[image])
        outputs += [float(p[c] * s) for c in range(len(p) - 1)]
    return np.array(outputs)


@quick
@given(seeds, class_counts)
def test_the_rule_paper_is_algorithm_2(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scores = Rule().log_scores(evidence)
    for i in range(len(scores)):
        expected = algorithm_2(evidence, i)
        np.testing.assert_allclose(np.exp(scores[i]), expected, rtol=1e-9)
        assert scores[i].argmax() == expected.argmax()


def test_the_rule_paper_weighs_probability_and_coefficient_by_one_without_calibration() -> None:
    assert Rule() == Rule("paper", {"probability": 1.0, "coefficient": 1.0}, (), ())


@quick
@given(seeds, class_counts, st.lists(st.floats(-3, 3), min_size=len(TERMS), max_size=len(TERMS)))
def test_the_score_is_the_weighted_sum_of_the_terms(seed: int, counts: list[int], weights: list[float]) -> None:
    evidence = random_evidence(seed, counts)
    expected = sum(weight * term(evidence, name) for weight, name in zip(weights, TERMS, strict=True))
    scores = Rule("fitted", dict(zip(TERMS, weights, strict=True))).log_scores(evidence)
    np.testing.assert_allclose(scores, expected, rtol=1e-9, atol=1e-9)


@quick
@given(seeds, class_counts)
def test_scales_multiply_logits_and_shifts_are_added_per_task(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scales, shifts = (tuple(np.random.default_rng(seed).uniform(0.5, 2, len(counts)).tolist()) for _ in range(2))
    scaled = with_parts(evidence, logits=[x * scale for x, scale in zip(evidence.logits, scales, strict=True)])
    expected = Rule().log_scores(scaled) + np.repeat(shifts, counts)
    np.testing.assert_allclose(replace(Rule(), scales=scales, shifts=shifts).log_scores(evidence), expected)


@quick
@given(seeds, class_counts, st.floats(-1e3, 1e3))
def test_shifting_all_logits_of_a_task_changes_nothing(seed: int, counts: list[int], shift: float) -> None:
    evidence = random_evidence(seed, counts)
    shifted = with_parts(evidence, logits=[evidence.logits[0] + shift, *evidence.logits[1:]])
    np.testing.assert_allclose(Rule().log_scores(shifted), Rule().log_scores(evidence), rtol=1e-9, atol=1e-9)


def test_extreme_evidence_stays_finite_and_ordered() -> None:
    evidence = random_evidence(0, [2, 1], n=2)
    logits = [np.array([[1e4, -1e4, 0.0], [-1e4, -2e4, 1e4]]), np.array([[-1e4, 1e4], [0.0, 0.0]])]
    evidence = with_parts(evidence, logits=logits, distances=[np.array([[0.0, 5.0], [1e9, 1e9]]), np.ones((2, 1))])
    assert np.isfinite(Rule("all", dict.fromkeys(TERMS, 1.0)).log_scores(evidence)).all()
    assert Rule().log_scores(evidence).argmax(axis=1).tolist() == [0, 2]


def test_unknown_evidence_is_named_with_what_is_known() -> None:
    with pytest.raises(ValueError, match="unknown evidence magic; this release supports probability, coefficient"):
        Rule.from_dict({"name": "x", "weights": {"magic": 1.0}, "scales": [], "shifts": []})


def test_a_rule_survives_json() -> None:
    rule = Rule("fitted", {"ridge": 0.3, "probability": 1.5}, (0.9, 1.1), (0.0, -0.2))
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule
