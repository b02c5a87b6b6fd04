import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.evidence import Evidence
from models.rules import Rule
from tests.tiny import class_tasks, learn_tasks, tiny_learner, tiny_settings
from trainer.rule_fit import FROZEN_WEIGHTS, fit_rule

quick = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**32 - 1)
N, C = 60, 4  # images, classes in two tasks of two


def held_out(seed: int, heads_know: bool, frozen_knows: bool) -> tuple[Evidence, NDArray[np.int64]]:
    """Images of four classes in two tasks; what does not know the class is noise."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, C, N)
    right = np.eye(C)[columns]
    logits = rng.normal(0, 1, (2, N, 3)) if not heads_know else rng.normal(0, 0.5, (2, N, 3))
    if heads_know:
        for k in range(2):
            logits[k, :, :2] += 4 * right[:, 2 * k : 2 * k + 2]
            logits[k, :, 2] += 4 * (1 - right[:, 2 * k : 2 * k + 2].sum(axis=1))
    frozen = rng.normal(3, 0.3, (N, C)) - 1.5 * right if frozen_knows else rng.normal(10, 1, (N, C))
    return Evidence(list(logits), [np.ones((N, 2))] * 2, frozen), columns


@quick
@given(seeds)
def test_frozen_evidence_that_alone_knows_gets_a_large_weight(seed: int) -> None:
    rule = fit_rule(tiny_settings(), *held_out(seed, heads_know=False, frozen_knows=True))
    assert rule.name == "product"
    assert rule.constants["frozen_weight"] >= 0.5


@quick
@given(seeds)
def test_frozen_evidence_that_is_noise_gets_a_small_weight(seed: int) -> None:
    rule = fit_rule(tiny_settings(), *held_out(seed, heads_know=True, frozen_knows=False))
    assert rule.constants["frozen_weight"] <= 0.05


@quick
@given(seeds, st.floats(0.01, 100))
def test_the_fitted_weight_is_one_of_those_measured_and_never_loses_to_the_smallest(seed: int, scale: float) -> None:
    evidence, columns = held_out(seed, heads_know=True, frozen_knows=True)
    evidence = Evidence(evidence.logits, evidence.distances, evidence.frozen * np.sqrt(scale))
    rule = fit_rule(tiny_settings(), evidence, columns)
    assert rule.constants["frozen_weight"] in FROZEN_WEIGHTS
    fitted, smallest = (
        (one.log_scores(evidence).argmax(axis=1) == columns).mean()
        for one in (rule, Rule("product", {"frozen_weight": FROZEN_WEIGHTS[0]}))
    )
    assert fitted >= smallest - 0.05


@pytest.mark.parametrize("weight", [0.0, 0.3, 7.0])
def test_a_weight_that_was_set_is_not_fitted(weight: float) -> None:
    case = held_out(0, heads_know=True, frozen_knows=False)
    assert fit_rule(tiny_settings(frozen_weight=weight), *case) == Rule("product", {"frozen_weight": weight})


def test_the_rule_paper_has_no_constants() -> None:
    case = held_out(0, heads_know=False, frozen_knows=True)
    assert fit_rule(tiny_settings(rule="paper", frozen_weight=0.3), *case) == Rule("paper")


@pytest.mark.parametrize("rule", ["paper", "product"])
def test_every_task_is_published_with_the_rule_of_the_settings(rule: str) -> None:
    for learned in learn_tasks(tiny_learner(rule=rule), class_tasks([2, 1])):
        assert learned.model.rule.name == rule
