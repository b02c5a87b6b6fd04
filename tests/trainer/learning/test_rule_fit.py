"""What the tasks say of their classes, and its gradient, for tasks of any sizes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.cascade import without_others
from models.inference.evidence import log_probabilities
from tests.support.evidence import quick, random_evidence, seeds
from trainer.learning.prior import Prior
from trainer.learning.rule_fit import TaskOutputs, cross_entropy, fit_rule

sizes = st.lists(st.integers(1, 9), min_size=1, max_size=5)


@quick
@given(seeds, sizes, st.booleans())
def test_outputs_of_tasks_of_any_sizes_are_their_log_probabilities(seed: int, counts: list[int], has_ood: bool) -> None:
    evidence = replace(random_evidence(seed, counts), has_ood=has_ood)
    scales = np.random.default_rng(seed).uniform(0.3, 2, len(counts))
    found = TaskOutputs(evidence).values(scales).T
    expected = log_probabilities(evidence, tuple(scales.tolist()))
    np.testing.assert_allclose(found, expected if has_ood else evidence.class_logits * evidence.per_class(scales))


@quick
@given(seeds, sizes)
def test_the_gradient_over_the_scales_is_that_of_small_changes(seed: int, counts: list[int]) -> None:
    evidence, rng = random_evidence(seed, counts), np.random.default_rng(seed)
    columns, scales = rng.integers(0, sum(counts), len(evidence.class_logits)), rng.uniform(0.5, 1.5, len(counts))
    outputs = TaskOutputs(evidence)
    slope = cross_entropy(outputs.values(scales), columns)[1]
    found, step = outputs.gradient(slope), 1e-6
    for k, own in enumerate(found):
        change = step * (np.arange(len(counts)) == k)
        values = [cross_entropy(outputs.values(scales + sign * change), columns)[0] for sign in (1, -1)]
        assert own == pytest.approx((values[0] - values[1]) / (2 * step), abs=1e-4)


def test_images_for_which_no_network_ran_calibrate_no_output() -> None:
    counts = (3, 2)
    evidence = random_evidence(0, list(counts), n=40)
    columns = np.random.default_rng(0).integers(0, 5, 40)
    some = np.arange(40) < 20
    chosen = np.repeat(some[:, None], 2, axis=1)
    rule = fit_rule(without_others(evidence, chosen), columns, Prior())
    wrong = np.where(some, columns, (columns + 2) % 5)  # other answers where no network ran
    weak = Prior(rule_strength=1e9)  # holds the weights, so that only the calibration could follow
    held = [fit_rule(without_others(evidence, chosen), labels, weak) for labels in (columns, wrong)]
    assert rule.uses_networks
    np.testing.assert_allclose(held[0].scales, held[1].scales, atol=1e-3)
    np.testing.assert_allclose(held[0].shifts, held[1].shifts, atol=1e-3)
