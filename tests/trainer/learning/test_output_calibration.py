"""+c, the paper's output calibration, against a separate transcription in numpy."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.inference.evidence import Evidence, Floats, FrozenScores
from models.inference.rules import PAPER_WITHOUT_OOD, Rule
from trainer.learning.rule_fit import OUTPUT_RIDGE, fit_outputs

COUNTS = (2, 3, 1)


def evidence_of(logits: Floats) -> Evidence:
    nothing = np.zeros_like(logits)
    frozen = FrozenScores(*(nothing for _ in fields(FrozenScores)))
    return Evidence(
        COUNTS, logits, np.full((len(logits), len(COUNTS)), -np.inf), nothing, nothing, frozen, has_ood=False
    )


def written_out_loss(logits: Floats, columns: list[int], alpha: list[float], beta: list[float]) -> float:
    """The cross-entropy of softmax over the concatenation of alpha_k f_k + beta_k, and the ridge."""
    total = 0.0
    for row, true in zip(logits, columns, strict=True):
        outputs = []
        start = 0
        for k, count in enumerate(COUNTS):
            outputs += [alpha[k] * f + beta[k] for f in row[start : start + count]]
            start += count
        total -= outputs[true] - np.log(sum(np.exp(o) for o in outputs))
    penalty = sum((a - 1) ** 2 for a in alpha) + sum(b**2 for b in beta)
    return total / len(columns) + OUTPUT_RIDGE / 2 * penalty


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1000))
def test_scale_and_shift_of_each_task_minimise_the_cross_entropy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.integers(6, size=60)
    logits = rng.normal(size=(60, 6)) + 1.5 * np.eye(6)[columns]
    logits *= np.repeat([0.3, 2.0, 1.0], COUNTS)  # tasks of different scales
    logits += np.repeat([1.0, 0.0, -1.0], COUNTS)
    rule = fit_outputs(Rule("paper", PAPER_WITHOUT_OOD), evidence_of(logits), columns)
    alpha, beta = list(rule.scales), list(rule.shifts)
    best = written_out_loss(logits, columns.tolist(), alpha, beta)
    for k in range(3):
        for change in (-0.02, 0.02):
            moved = [*alpha[:k], alpha[k] + change, *alpha[k + 1 :]]
            assert written_out_loss(logits, columns.tolist(), moved, beta) >= best - 1e-7
            moved = [*beta[:k], beta[k] + change, *beta[k + 1 :]]
            assert written_out_loss(logits, columns.tolist(), alpha, moved) >= best - 1e-7
    scores = rule.log_scores(evidence_of(logits))
    expected = logits * np.repeat(alpha, COUNTS) + np.repeat(beta, COUNTS)
    np.testing.assert_allclose(scores, expected)
    assert best < written_out_loss(logits, columns.tolist(), [1.0] * 3, [0.0] * 3)


def test_one_task_needs_no_calibration() -> None:
    evidence = Evidence((2,), np.ones((3, 2)), np.zeros((3, 1)), np.ones((3, 2)), np.ones((3, 2)), None)  # type: ignore[arg-type]
    rule = Rule("paper")
    assert fit_outputs(rule, evidence, np.array([0, 1, 0])) == rule


def test_heads_without_ood_are_weighed_by_their_logits() -> None:
    logits = np.array([[1.0, 0.0, 3.0, 0.0, 0.0, 2.0]])
    evidence = evidence_of(logits)
    assert not evidence.has_ood
    rule = Rule("x", {"logit": 2.0}, scales=(1.0, 0.5, 1.0), shifts=(0.0, 0.0, 1.0))
    assert rule.log_scores(evidence)[0].tolist() == pytest.approx([2.0, 0.0, 3.0, 0.0, 0.0, 5.0])
    again = Rule.from_dict(Rule("x", {"logit": 2.0}, (1.0,), (0.0,), rotations=4).to_dict())
    assert (again.rotations, again.uses_networks) == (4, True)
