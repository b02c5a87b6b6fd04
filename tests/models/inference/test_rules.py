"""Rules: the paper's equations, written again with probabilities, give the same scores."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.evidence import Evidence, Floats
from models.inference.rules import RULES, Rule
from tests.support.evidence import class_counts, quick, random_evidence, seeds

FROZEN_WEIGHT = {"frozen_weight": 0.3}


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
    scores = Rule("paper").log_scores(evidence)
    for i in range(len(scores)):
        expected = algorithm_2(evidence, i)
        np.testing.assert_allclose(np.exp(scores[i]), expected, rtol=1e-9)
        assert scores[i].argmax() == expected.argmax()
        assert np.exp(scores[i].max()) == pytest.approx(expected.max(), rel=1e-9)


@quick
@given(seeds, class_counts)
def test_the_rule_product_is_algorithm_2_times_the_frozen_likelihood(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scores = Rule("product", FROZEN_WEIGHT).log_scores(evidence)
    for i in range(len(scores)):
        likelihood = np.exp(-(evidence.frozen[i] ** 2) / 2)
        np.testing.assert_allclose(np.exp(scores[i]), algorithm_2(evidence, i) * likelihood**0.3, rtol=1e-9)


@quick
@given(seeds, class_counts)
def test_a_product_with_no_frozen_weight_is_the_paper(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    product = Rule("product", {"frozen_weight": 0.0}).log_scores(evidence)
    np.testing.assert_array_equal(product, Rule("paper").log_scores(evidence))


@quick
@given(seeds, class_counts, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from(["paper", "plain", "product"]))
def test_a_temperature_divides_every_logit_and_one_is_the_papers(
    seed: int, counts: list[int], temperature: float, name: str
) -> None:
    evidence = random_evidence(seed, counts)
    cooled = replace(evidence, logits=[x / temperature for x in evidence.logits])
    scores = Rule(name, {**FROZEN_WEIGHT, "temperature": temperature}).log_scores(evidence)
    np.testing.assert_allclose(scores, Rule(name, FROZEN_WEIGHT).log_scores(cooled), rtol=1e-12)


@quick
@given(seeds, class_counts)
def test_the_rule_plain_is_the_probabilities_alone(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    alone = replace(evidence, distances=[np.ones_like(x) for x in evidence.distances])
    scores = Rule("plain").log_scores(evidence)
    np.testing.assert_allclose(np.exp(scores), [algorithm_2(alone, i) for i in range(len(scores))], rtol=1e-9)


@quick
@given(seeds, class_counts)
def test_the_rule_frozen_prefers_the_nearest_class_mean(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scores = Rule("frozen").log_scores(evidence)
    np.testing.assert_allclose(scores, -(evidence.frozen**2) / 2)
    assert (scores.argmax(axis=1) == evidence.frozen.argmin(axis=1)).all()


def test_the_rule_logits_concatenates_the_heads_without_ood() -> None:
    evidence = Evidence(
        [np.array([[1.0, 2.0, 9.0]]), np.array([[3.0, 8.0]])], [np.ones((1, 2)), np.ones((1, 1))], np.ones((1, 3))
    )
    assert Rule("logits").log_scores(evidence).tolist() == [[1.0, 2.0, 3.0]]


@quick
@given(seeds, class_counts, st.sampled_from(["paper", "product", "plain", "frozen"]), st.floats(-1e3, 1e3))
def test_shifting_all_logits_of_a_task_changes_nothing(seed: int, counts: list[int], name: str, shift: float) -> None:
    evidence = random_evidence(seed, counts)
    shifted = replace(evidence, logits=[evidence.logits[0] + shift, *evidence.logits[1:]])
    rule = Rule(name, FROZEN_WEIGHT)
    np.testing.assert_allclose(rule.log_scores(shifted), rule.log_scores(evidence), rtol=1e-9, atol=1e-9)


def test_extreme_evidence_stays_finite_and_ordered() -> None:
    logits = [np.array([[1e4, -1e4, 0.0], [-1e4, -2e4, 1e4]]), np.array([[-1e4, 1e4], [0.0, 0.0]])]
    evidence = Evidence(logits, [np.array([[0.0, 5.0], [1e9, 1e9]]), np.ones((2, 1))], np.full((2, 3), 1e3))
    for name in RULES:
        scores = Rule(name, FROZEN_WEIGHT).log_scores(evidence)
        assert scores.shape == (2, 3)
        assert np.isfinite(scores).all()
    assert Rule("paper").log_scores(evidence).argmax(axis=1).tolist() == [0, 2]


def test_an_unknown_rule_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="unknown rule 'magic'; this release knows paper, product"):
        Rule.from_dict({"name": "magic", "constants": {}})


def test_a_rule_survives_json() -> None:
    rule = Rule("product", FROZEN_WEIGHT)
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule
