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
def test_frozen_evidence_that_alone_knows_keeps_its_weight_or_gets_more(seed: int) -> None:
    rule = fit_rule("product", *held_out(seed, heads_know=False, frozen_knows=True))
    assert rule.name == "product"
    assert rule.constants["frozen_weight"] >= 0.2  # the preferred one, or more: 0.5 for nearly all seeds


@quick
@given(seeds)
def test_frozen_evidence_that_is_noise_gets_a_small_weight(seed: int) -> None:
    rule = fit_rule("product", *held_out(seed, heads_know=True, frozen_knows=False))
    assert rule.constants["frozen_weight"] <= 0.05


@quick
@given(seeds, st.floats(0.01, 100))
def test_the_fitted_weight_is_one_of_those_measured_and_never_loses_to_the_smallest(seed: int, scale: float) -> None:
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
def test_heads_that_are_too_sure_of_themselves_are_cooled(name: str) -> None:
    """Wrong on four images of ten, and sixteen times as loud about it."""
    rng = np.random.default_rng(0)
    evidence, columns = held_out(0, heads_know=True, frozen_knows=True)
    wrong = rng.random(N) < 0.4
    logits = [np.where(wrong[:, None], rng.normal(0, 1, x.shape), x / 4) for x in evidence.logits]
    calm, sure = (
        fit_rule(name, Evidence([x * factor for x in logits], evidence.distances, evidence.frozen), columns)
        for factor in (1.0, 16.0)
    )
    assert sure.constants["temperature"] > calm.constants["temperature"]


def preferred(name: str) -> Rule:
    """What most measured versions ask for: the first of each constant."""
    return Rule(name, {constant: values[0] for constant, values in CONSTANTS[name].items()})


def test_the_preferred_constants_are_those_that_were_measured() -> None:
    assert preferred("product") == Rule("product", {"temperature": 8.0, "frozen_weight": 0.2})


names = st.sampled_from(list(CONSTANTS))


@quick
@given(seeds, names, st.floats(0.1, 30))
def test_one_class_says_nothing_and_keeps_the_preferred_constants(seed: int, name: str, scale: float) -> None:
    rng = np.random.default_rng(seed)
    evidence = Evidence([rng.normal(0, scale, (N, 2))], [rng.uniform(0.5, 30, (N, 1))], rng.uniform(0.5, 10, (N, 1)))
    assert fit_rule(name, evidence, np.zeros(N, np.int64)) == preferred(name)


@quick
@given(seeds, st.sampled_from(["plain", "paper"]), st.floats(1, 20))
def test_one_task_keeps_the_preferred_temperature_which_changes_no_order_of_its_classes(
    seed: int, name: str, scale: float
) -> None:
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, C, N)
    logits = rng.normal(0, scale, (N, C + 1))
    logits[:, :C] += scale * np.eye(C)[columns]
    evidence = Evidence([logits], [rng.uniform(0.5, 30, (N, C))], rng.uniform(0.5, 10, (N, C)))
    assert fit_rule(name, evidence, columns) == preferred(name)


@quick
@given(seeds, names, st.sampled_from([[C], [2, 2]]))
def test_perfectly_separated_images_keep_the_preferred_constants(seed: int, name: str, counts: list[int]) -> None:
    """Heads that are sure and right, tasks and classes that lie far apart."""
    rng = np.random.default_rng(seed)
    columns = rng.integers(0, C, N)
    logits, distances, first = [], [], 0
    for count in counts:
        own = np.eye(C)[columns][:, first : first + count]
        logits.append(np.hstack([own, 1 - own.sum(axis=1, keepdims=True)]) * 20 + rng.normal(0, 0.1, (N, count + 1)))
        distances.append(30.0 - 25.0 * own)
        first += count
    evidence = Evidence(logits, distances, 40.0 - 35.0 * np.eye(C)[columns])
    assert fit_rule(name, evidence, columns) == preferred(name)


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


def test_a_cross_fitted_image_is_judged_as_its_fold_would_have_seen_it(learned: tuple[Model, Features]) -> None:
    model, features = learned
    plain = model.evidence(features)
    first = HeldOut("class 1/40", "class 1", (1.0, -2.0, 0.5), (2.0, 3.0))
    second = HeldOut("class 2/41", "class 2", (0.25, 4.0), (5.0,))
    moved = held_out_evidence(model, features, [first, second])
    np.testing.assert_allclose(moved.logits[0], plain.logits[0] + [[1, -2, 0.5], [0, 0, 0]])
    np.testing.assert_allclose(moved.logits[1], plain.logits[1] + [[0, 0], [0.25, 4]])
    # Its own task and the frozen statistics without the image, its own task's as the fold had them.
    own = [task.gaussians.distances_without for task in model.tasks]
    alone = [own[0](features.tasks[0][:1], np.array([1])) * [2, 3], own[1](features.tasks[1][1:], np.array([0])) * 5]
    np.testing.assert_allclose(moved.distances[0], [*alone[0], plain.distances[0][1]])
    np.testing.assert_allclose(moved.distances[1], [plain.distances[1][0], *alone[1]])
    np.testing.assert_allclose(moved.frozen, model.frozen.distances_without(features.frozen, np.array([1, 2])))


def test_a_held_out_image_and_one_of_a_class_not_learned_are_judged_as_they_are(
    learned: tuple[Model, Features],
) -> None:
    model, features = learned
    plain = model.evidence(features)
    shifted = HeldOut("class 2/41", "never learned", (1.0, 1.0), (2.0,))
    moved = held_out_evidence(model, features, [HeldOut("class 1/40", "class 1"), shifted])
    np.testing.assert_array_equal(moved.frozen, plain.frozen)
    for k in range(2):
        np.testing.assert_array_equal(moved.logits[k], plain.logits[k])
        np.testing.assert_array_equal(moved.distances[k], plain.distances[k])
