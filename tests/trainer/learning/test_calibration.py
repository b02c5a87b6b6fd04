import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Features
from models.inference.model import Model
from models.inference.rules import Rule
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_learner
from trainer.learning.calibration import CONSTANTS, FROZEN_WEIGHTS, fit_rule, held_out_evidence
from trainer.learning.memory import HeldOut

quick = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**32 - 1)
N, C = 60, 4  # images, classes in two tasks of two


def held_out(seed: int, heads_know: bool, frozen_knows: bool) -> tuple[Evidence, NDArray[np.int64]]:
    """Evidence of four classes in two tasks; heads or frozen distances that do not know the class are noise."""
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
def test_informative_frozen_evidence_gets_at_least_the_default_weight(seed: int) -> None:
    rule = fit_rule("product", *held_out(seed, heads_know=False, frozen_knows=True))
    assert rule.name == "product"
    assert rule.constants["frozen_weight"] >= 0.2  # the default or more; 0.5 for nearly all seeds


@quick
@given(seeds)
def test_noisy_frozen_evidence_gets_a_small_weight(seed: int) -> None:
    rule = fit_rule("product", *held_out(seed, heads_know=True, frozen_knows=False))
    assert rule.constants["frozen_weight"] <= 0.05


@quick
@given(seeds, st.floats(0.01, 100))
def test_the_fitted_weight_is_in_the_grid_and_not_worse_than_the_default(seed: int, scale: float) -> None:
    evidence, columns = held_out(seed, heads_know=True, frozen_knows=True)
    evidence = Evidence(evidence.logits, evidence.distances, evidence.frozen * np.sqrt(scale))
    rule = fit_rule("product", evidence, columns)
    assert rule.constants["frozen_weight"] in FROZEN_WEIGHTS
    fitted, smallest = (
        (one.log_scores(evidence).argmax(axis=1) == columns).mean()
        for one in (rule, Rule("product", {"temperature": 1.0, "frozen_weight": FROZEN_WEIGHTS[0]}))
    )
    assert fitted >= smallest - 0.05


@pytest.mark.parametrize("name", ["plain", "paper", "product"])
def test_overconfident_heads_get_a_higher_temperature(name: str) -> None:
    """Heads that are wrong on four of ten images, with logits as they are and sixteen times as large."""
    rng = np.random.default_rng(0)
    evidence, columns = held_out(0, heads_know=True, frozen_knows=True)
    wrong = rng.random(N) < 0.4
    logits = [np.where(wrong[:, None], rng.normal(0, 1, x.shape), x / 4) for x in evidence.logits]
    plain, overconfident = (
        fit_rule(name, Evidence([x * factor for x in logits], evidence.distances, evidence.frozen), columns)
        for factor in (1.0, 16.0)
    )
    assert overconfident.constants["temperature"] > plain.constants["temperature"]


def default_rule(name: str) -> Rule:
    """The rule with the first value of each constant."""
    return Rule(name, {constant: values[0] for constant, values in CONSTANTS[name].items()})


def test_the_default_constants_are_the_measured_ones() -> None:
    assert default_rule("product") == Rule("product", {"temperature": 8.0, "frozen_weight": 0.2})


names = st.sampled_from(list(CONSTANTS))


@quick
@given(seeds, names, st.floats(0.1, 30))
def test_one_class_keeps_the_default_constants(seed: int, name: str, scale: float) -> None:
    rng = np.random.default_rng(seed)
    evidence = Evidence([rng.normal(0, scale, (N, 2))], [rng.uniform(0.5, 30, (N, 1))], rng.uniform(0.5, 10, (N, 1)))
    assert fit_rule(name, evidence, np.zeros(N, np.int64)) == default_rule(name)


@quick
@given(seeds, st.sampled_from(["plain", "paper"]), st.floats(1, 20))
def test_one_task_keeps_the_default_temperature(seed: int, name: str, scale: float) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, C, N)
    logits = rng.normal(0, scale, (N, C + 1))
    logits[:, :C] += scale * np.eye(C)[columns]
    evidence = Evidence([logits], [rng.uniform(0.5, 30, (N, C))], rng.uniform(0.5, 10, (N, C)))
    assert fit_rule(name, evidence, columns) == default_rule(name)


@quick
@given(seeds, names, st.sampled_from([[C], [2, 2]]))
def test_perfectly_separated_images_keep_the_default_constants(seed: int, name: str, counts: list[int]) -> None:
    """Heads are confident and right; tasks and classes lie far apart."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, C, N)
    logits, distances, first = [], [], 0
    for count in counts:
        own = np.eye(C)[columns][:, first : first + count]
        logits.append(np.hstack([own, 1 - own.sum(axis=1, keepdims=True)]) * 20 + rng.normal(0, 0.1, (N, count + 1)))
        distances.append(30.0 - 25.0 * own)
        first += count
    evidence = Evidence(logits, distances, 40.0 - 35.0 * np.eye(C)[columns])
    assert fit_rule(name, evidence, columns) == default_rule(name)


def test_a_rule_without_constants_has_nothing_to_fit() -> None:
    case = held_out(0, heads_know=False, frozen_knows=True)
    assert fit_rule("frozen", *case) == Rule("frozen")
    assert fit_rule("logits", *case) == Rule("logits")
    assert set(fit_rule("paper", *case).constants) == {"temperature"}


@pytest.mark.parametrize("rule", ["paper", "product"])
def test_every_task_is_published_with_the_rule_of_the_settings(rule: str) -> None:
    for learned in learn_tasks(tiny_learner(rule=rule), class_tasks([2, 1])):
        assert learned.model.rule.name == rule


# The evidence of held-out images


@pytest.fixture(scope="module")
def learned() -> tuple[Model, Features]:
    learner = tiny_learner()
    model = learn_tasks(learner, class_tasks([2, 1]))[-1].model
    return model, learner.features(model, ["class 1/40", "class 2/41"])


def test_the_evidence_of_a_cross_fitted_image_is_corrected_by_its_fold(learned: tuple[Model, Features]) -> None:
    model, features = learned
    plain = model.evidence(features)
    first = HeldOut("class 1/40", "class 1", (1.0, -2.0, 0.5), (2.0, 3.0))
    second = HeldOut("class 2/41", "class 2", (0.25, 4.0), (5.0,))
    corrected = held_out_evidence(model, features, [first, second])
    np.testing.assert_allclose(corrected.logits[0], plain.logits[0] + [[1, -2, 0.5], [0, 0, 0]])
    np.testing.assert_allclose(corrected.logits[1], plain.logits[1] + [[0, 0], [0.25, 4]])
    # Distances leave out the image itself; those of its own task are scaled by what its fold measured.
    own = [task.gaussians.distances_without for task in model.tasks]
    without = [own[0](features.tasks[0][:1], np.array([1])) * [2, 3], own[1](features.tasks[1][1:], np.array([0])) * 5]
    np.testing.assert_allclose(corrected.distances[0], [*without[0], plain.distances[0][1]])
    np.testing.assert_allclose(corrected.distances[1], [plain.distances[1][0], *without[1]])
    np.testing.assert_allclose(corrected.frozen, model.frozen.distances_without(features.frozen, np.array([1, 2])))


def test_the_evidence_of_a_held_out_image_or_an_unknown_class_is_not_corrected(
    learned: tuple[Model, Features],
) -> None:
    model, features = learned
    plain = model.evidence(features)
    shifted = HeldOut("class 2/41", "never learned", (1.0, 1.0), (2.0,))
    corrected = held_out_evidence(model, features, [HeldOut("class 1/40", "class 1"), shifted])
    np.testing.assert_array_equal(corrected.frozen, plain.frozen)
    for k in range(2):
        np.testing.assert_array_equal(corrected.logits[k], plain.logits[k])
        np.testing.assert_array_equal(corrected.distances[k], plain.distances[k])
