from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray

import trainer.learning.back_update
import trainer.learning.learner
from models.inference.evidence import log_softmax
from models.inference.gaussians import Gaussians
from models.inference.model import Head, TaskModel
from models.network.adapted_blocks import tensors_of
from tests.support.tiny_model import TinyImages, class_tasks, learn_tasks, silent_progress, tiny_learner, tiny_settings
from trainer.learning.back_update import BackUpdate, head_problem, update_heads
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.settings import LearnerSettings

Array = NDArray[np.float32]
SGD = tiny_settings(back_solver="sgd", back_epochs=10, back_learning_rate=0.01, back_batch=16, momentum=0.9)
CONVEX = tiny_settings(back_solver="convex")


def around(centre: list[float], count: int, seed: int) -> Array:
    return (np.array(centre) + 0.3 * np.random.default_rng(seed).normal(size=(count, 3))).astype(np.float32)


@pytest.fixture
def head() -> Head:
    """Two classes along the first axis; `ood` is untrained."""
    return Head(np.array([[2, 0, 0], [-2, 0, 0], [0, 0, 0]], np.float32), np.array([0, 0, -5], np.float32))


OWN = np.concatenate([around([2, 0, 0], 15, 0), around([-2, 0, 0], 15, 1)])
LABELS = np.repeat([0, 1], 15).astype(np.int64)
OTHERS = around([1, 3, 0], 40, 2)  # they differ from the first class only in the second axis
GAUSSIANS = Gaussians.fit(OWN, LABELS, 2)


@pytest.fixture(params=[SGD, CONVEX], ids=["sgd", "convex"])
def settings(request: pytest.FixtureRequest) -> LearnerSettings:
    chosen: LearnerSettings = request.param
    return chosen


def update(
    head: Head,
    settings: LearnerSettings,
    own: Array = OWN,
    others: Array = OTHERS,
    *,
    labels: NDArray[np.int64] | None = None,
    gaussians: Gaussians = GAUSSIANS,
    seed: int = 0,
) -> Head:
    labels = LABELS[: len(own)] if labels is None else labels
    task = BackUpdate(head, gaussians, own, labels, others, np.ones(len(others)))
    (updated,) = update_heads([task], settings, np.random.default_rng(seed))
    return updated


def draws(count: int, seed: int) -> tuple[Array, NDArray[np.int64]]:
    """Draws from the head's own class Gaussians."""
    labels = np.repeat([0, 1], count).astype(np.int64)
    return GAUSSIANS.sample(labels, np.random.default_rng(seed)).astype(np.float32), labels


def test_an_earlier_head_learns_to_call_the_new_task_ood(head: Head, settings: LearnerSettings) -> None:
    unseen = around([1, 3, 0], 100, 3)
    assert (head.logits(unseen).argmax(axis=1) == 2).mean() == 0
    after = update(head, settings)
    assert (after.logits(unseen).argmax(axis=1) == 2).mean() > 0.95
    assert (after.logits(OWN).argmax(axis=1) == LABELS).mean() > 0.95


def test_own_images_keep_their_class_when_others_outnumber_them_twenty_to_one(
    head: Head, settings: LearnerSettings
) -> None:
    own = np.concatenate([OWN[:3], OWN[15:18]])
    labels = np.repeat([0, 1], 3).astype(np.int64)
    others = around([1, 3, 0], 120, 4)
    after = update(head, settings, own, others, labels=labels)
    assert (after.logits(OWN).argmax(axis=1) == LABELS).mean() > 0.95


def test_a_head_trained_only_on_draws_recognises_its_classes(head: Head, settings: LearnerSettings) -> None:
    own, labels = draws(15, 0)
    after = update(head, settings, own, labels=labels)
    fresh, truth = draws(200, 1)
    assert (after.logits(fresh).argmax(axis=1) == truth).mean() > 0.95
    assert (after.logits(OTHERS).argmax(axis=1) == 2).mean() > 0.95


@pytest.mark.parametrize("solver", ["sgd", "convex"])
def test_draws_keep_own_classes_probable_when_the_memory_has_one_image_per_class(head: Head, solver: str) -> None:
    """The only image of each class lies far from the others: without draws it moves the border too far."""
    own = np.array([[2, -2, 0], [-2, -2, 0]], np.float32)
    others = np.concatenate([around([2, 1.2, 0], 20, 5), around([-2, 1.2, 0], 20, 6)])
    alone = Gaussians(own.astype(np.float64), np.ones(2, np.int64), np.eye(3), np.full(3, 1e-9))
    fresh, truth = draws(200, 1)
    settings, sure = tiny_settings(back_solver=solver, back_epochs=40, back_batch=16), []
    for gaussians in (GAUSSIANS, alone):
        after = update(head, settings, own, others, labels=np.arange(2), gaussians=gaussians)
        sure.append(np.exp(log_softmax(after.logits(fresh)))[np.arange(len(truth)), truth].mean())
        assert (after.logits(others).argmax(axis=1) == 2).mean() > 0.95
    assert sure[0] > sure[1] + 0.02


@pytest.mark.parametrize("count", range(1, 18))
def test_draws_never_replace_other_images_whatever_the_size_of_the_last_batch(head: Head, count: int) -> None:
    """A batch of 16 holds 8 own and 8 others; the last batch holds 1 to 8. Draws are marked by a distant feature."""
    own, labels = np.concatenate([OWN[:1], OWN[15:16]]), np.arange(2)
    seen: list[tuple[Array, list[int]]] = []

    def sample(self: Gaussians, classes: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.float64]:
        return np.tile([0.0, 0.0, 77.0], (len(classes), 1))

    def recording(logits: Any, target: Any) -> Any:
        seen.append((inputs[-1], target.tolist()))
        return cross_entropy(logits, target)

    def linear(batch: Any, *rest: Any) -> Any:
        inputs.append(batch.numpy().copy())
        return plain_linear(batch, *rest)

    inputs: list[Array] = []
    functional = trainer.learning.back_update.F
    cross_entropy, plain_linear = functional.cross_entropy, functional.linear
    settings = tiny_settings(back_solver="sgd", back_epochs=1, back_batch=16, back_learning_rate=1e-6)
    with (
        patch.object(Gaussians, "sample", sample),
        patch.object(functional, "cross_entropy", recording),
        patch.object(functional, "linear", linear),
    ):
        update(head, settings, own, around([1, 3, 0], count, 6), labels=labels)
    assert sum(len(target) for _, target in seen) == 2 * max(count, 2)
    for batch, target in seen:
        drawn = batch[:, 2] == 77
        mine = np.array(target) != 2
        assert mine.sum() * 2 == len(target)
        assert drawn.sum() == mine.sum() // 2
        assert not (drawn & ~mine).any()


NO_FEATURES = np.zeros((0, 3), np.float32)


def test_a_head_without_own_images_is_not_changed(head: Head, settings: LearnerSettings) -> None:
    after = update(head, settings, own=NO_FEATURES)
    assert np.array_equal(after.weight, head.weight)
    assert np.array_equal(after.bias, head.bias)


def test_a_head_without_other_images_learns_its_own_classes(head: Head, settings: LearnerSettings) -> None:
    """The only task is extended: a class whose features moved is recognised at its new place."""
    own = np.concatenate([around([2, 0, 0], 15, 0), around([1, 2, 0], 15, 1)])
    gaussians = Gaussians.fit(own, LABELS, 2)
    after = update(head, settings, own, NO_FEATURES, gaussians=gaussians)
    assert (head.logits(own).argmax(axis=1) == LABELS).mean() <= 0.5
    assert (after.logits(own).argmax(axis=1) == LABELS).mean() > 0.95


def test_the_same_seed_gives_the_same_head(head: Head, settings: LearnerSettings) -> None:
    one, same, other = update(head, settings), update(head, settings), update(head, settings, seed=1)
    assert np.array_equal(one.weight, same.weight)
    assert np.array_equal(one.bias, same.bias)
    assert not np.array_equal(one.weight, other.weight)


def test_the_given_head_is_not_changed_in_place(head: Head, settings: LearnerSettings) -> None:
    weight, bias = head.weight.copy(), head.bias.copy()
    after = update(head, settings)
    assert np.array_equal(head.weight, weight)
    assert np.array_equal(head.bias, bias)
    assert after.weight.shape == weight.shape
    assert not np.array_equal(after.weight, weight)


def test_a_single_step_is_a_quarter_memory_a_quarter_draws_and_half_others(head: Head) -> None:
    """One epoch of one batch, no momentum: the gradient of Eq. backward computed in numpy."""
    settings = tiny_settings(back_solver="sgd", back_epochs=1, back_learning_rate=0.1, back_batch=8, momentum=0.0)
    own, others = np.repeat(OWN[:1], 4, axis=0), OTHERS[:4]  # equal, so that it does not matter which are replaced
    with patch.object(Gaussians, "sample", lambda self, classes, rng: self.means[classes]):
        after = update(head, settings, own, others)
    drawn = np.repeat(GAUSSIANS.means[:1].astype(np.float32), 2, axis=0)
    x = np.concatenate([drawn, own[:2], others]).astype(np.float64)
    logits = head.logits(x)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = (p - np.eye(3)[[0, 0, 0, 0, 2, 2, 2, 2]]) / 8
    np.testing.assert_allclose(after.weight, head.weight - 0.1 * error.T @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.bias, head.bias - 0.1 * error.sum(0), rtol=1e-5, atol=1e-6)


def nearest(rows: Array, among: Array) -> float:
    """The largest distance of a row to its nearest neighbour in `among`."""
    return float(np.abs(rows[:, None] - among[None]).max(axis=2).min(axis=1).max(initial=0.0))


def test_every_earlier_head_is_updated_on_its_own_tasks_features() -> None:
    """The research code takes the first task's features for every head."""
    learner = tiny_learner(replay_size=9)
    parent = learn_tasks(learner, class_tasks([2, 1]))[-1]
    calls: list[BackUpdate] = []

    def recording(updates: Iterable[BackUpdate], *rest: Any) -> Iterator[Head]:
        calls.extend(updates)
        return update_heads(calls, *rest)

    new = TinyImages().batch(["new"], count=30)
    with patch.object(trainer.learning.learner, "update_heads", recording):
        child = learner.learn(parent.model, parent.samples, new, Checkpoint(None), silent_progress())
    held_out = {sample.key for sample in child.samples.held_out}
    memory = parent.samples.memory
    trained_on = [key for key in new["new"] if key not in held_out]
    assert len(calls) == 2
    for task, call in zip(parent.model.tasks, calls, strict=True):
        assert call.head is task.head
        assert call.gaussians is task.gaussians

        def z(keys: list[str], task: TaskModel = task) -> Array:
            return learner.tokens.features(keys, tensors_of(task))

        mine = [key for name in task.classes for key in memory[name]]
        rest = [key for name, keys in memory.items() if name not in task.classes for key in keys]
        np.testing.assert_allclose(call.own, z(mine), atol=1e-5)
        assert call.labels.tolist() == [c for c, name in enumerate(task.classes) for _ in memory[name]]
        # The rest of the memory, and as many of the new task's training images as the memory has: |M| = 9.
        assert len(call.others) == len(rest) + 9
        assert nearest(z(rest), call.others) < 1e-5
        assert nearest(call.others, z(rest + trained_on)) < 1e-5


def batches(head: Head, own: Array, labels: NDArray[np.int64], settings: LearnerSettings) -> list[tuple[Array, Any]]:
    """The (features, labels) of every training step."""
    seen: list[tuple[Array, Any]] = []
    inputs: list[Array] = []
    functional = trainer.learning.back_update.F
    cross_entropy, plain_linear = functional.cross_entropy, functional.linear

    def linear(batch: Any, *rest: Any) -> Any:
        inputs.append(batch.numpy().copy())
        return plain_linear(batch, *rest)

    def recording(logits: Any, target: Any) -> Any:
        seen.append((inputs[-1], target.numpy().copy()))
        return cross_entropy(logits, target)

    with patch.object(functional, "cross_entropy", recording), patch.object(functional, "linear", linear):
        update(head, settings, own, labels=labels)
    return seen


@pytest.mark.parametrize("counts", [(1, 15), (15, 2), (15, 15)])
@pytest.mark.parametrize(("others", "own_share"), [(OTHERS, 0.5), (NO_FEATURES, 1.0)])
def test_own_and_others_classes_and_draws_have_the_weights_of_the_objective(
    head: Head, counts: tuple[int, int], others: Array, own_share: float
) -> None:
    own = np.concatenate([OWN[: counts[0]], OWN[15 : 15 + counts[1]]])
    labels = np.repeat([0, 1], counts).astype(np.int64)
    problem = head_problem(
        BackUpdate(head, GAUSSIANS, own, labels, others, np.ones(len(others))), CONVEX, np.random.default_rng(0)
    )
    weight, n = problem.weights, len(own)
    assert weight.sum() == pytest.approx(1)
    assert weight[problem.labels < 2].sum() == pytest.approx(own_share)
    for c in (0, 1):
        memory = weight[:n][problem.labels[:n] == c]
        assert memory.sum() == pytest.approx(own_share / 4)  # the other half of the class are draws
        assert np.ptp(memory) == 0
        assert weight[problem.labels == c].sum() == pytest.approx(own_share / 2)
        assert (problem.labels == c).sum() == counts[c] + CONVEX.keep_per_class


@pytest.mark.parametrize("counts", [(1, 15), (15, 2), (15, 15)])
def test_classes_have_equal_weight_and_no_image_is_left_out(head: Head, counts: tuple[int, int]) -> None:
    own = np.concatenate([OWN[: counts[0]], OWN[15 : 15 + counts[1]]])
    labels = np.repeat([0, 1], counts).astype(np.int64)
    steps = batches(head, own, labels, tiny_settings(back_solver="sgd", back_epochs=4, back_batch=16, back_drawn=0))
    targets = np.concatenate([target for _, target in steps])
    assert abs(int((targets == 0).sum()) - int((targets == 1).sum())) <= 1
    assert (targets == 2).sum() == (targets != 2).sum()
    trained_on = {row.tobytes() for batch, target in steps for row in batch[target != 2]}
    assert trained_on == {row.tobytes() for row in own}


def others_of_heads(aliases: dict[str, str | None]) -> list[set[str]]:
    """The earlier classes whose images each head sees as `ood` when a third task is learned."""
    learner = tiny_learner(replay_size=12)
    parent = learn_tasks(learner, class_tasks([2, 2]))[-1]
    asked: list[list[str]] = []
    features = learner.tokens.features

    def recording(keys: Any, tensors: Any, **more: Any) -> Any:
        asked.append(list(keys))
        return features(keys, tensors, **more)

    others: list[list[str]] = []

    def updating(updates: Iterable[BackUpdate], *rest: Any) -> Iterator[Head]:
        for update in updates:
            others.append(asked[-2])  # the kept ones; the last are those of the new task
            yield update.head

    model = replace(parent.model, aliases=aliases)
    with (
        patch.object(learner.tokens, "features", recording),
        patch.object(trainer.learning.learner, "update_heads", updating),
    ):
        learner.learn(model, parent.samples, TinyImages().batch(["new"]), Checkpoint(None), silent_progress())
    return [{key.split("/")[0] for key in keys} for keys in others]


def test_a_class_merged_with_a_class_of_the_task_is_not_ood() -> None:
    assert others_of_heads({}) == [{"class 2", "class 3"}, {"class 0", "class 1"}]
    assert others_of_heads({"class 3": "class 0"}) == [{"class 2"}, {"class 1"}]
    chain = {"class 1": "class 0", "class 0": "class 2"}
    assert others_of_heads(chain) == [{"class 3"}, set()]


def test_retired_classes_stay_ood_for_other_tasks() -> None:
    """An image of a retired class is to be answered as novel, also by the heads of other retired classes."""
    assert others_of_heads({"class 0": None, "class 2": None}) == [{"class 2", "class 3"}, {"class 0", "class 1"}]


@pytest.mark.parametrize("memory", [4, 500])
def test_a_class_extended_by_many_images_does_not_dominate_the_other_class_of_its_task(memory: int) -> None:
    """The memory holds two images of each class; then one class gets sixty, with a full and a large memory."""
    right: list[list[float]] = []
    for seed in range(3):
        chosen = {"epochs": 8, "learning_rate": 0.1, "sparsity": 0.003, "back_epochs": 10, "seed": seed}
        learner, source = tiny_learner(replay_size=memory, noise=120.0, **chosen), TinyImages(120.0)
        parent = learn_tasks(learner, class_tasks([2], images=3))[0]
        assert {name: len(keys) for name, keys in parent.samples.memory.items()} == {"class 0": 2, "class 1": 2}
        more = source.batch(["class 0"], count=60, start=100)
        child = learner.learn(parent.model, parent.samples, more, Checkpoint(None), silent_progress())
        sibling = source.batch(["class 1"], count=40, start=500)["class 1"]
        z = learner.tokens.features(sibling, tensors_of(child.model.tasks[0]))
        heads = [model.tasks[0].head for model in (parent.model, child.model)]
        right.append([float((head.logits(z)[:, :2].argmax(axis=1) == 1).mean()) for head in heads])
    before, after = np.mean(right, axis=0)
    assert after >= before - 0.1
