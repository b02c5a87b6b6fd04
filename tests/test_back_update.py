import numpy as np
import pytest
from numpy.typing import NDArray

from models.model import Head
from tests.tiny import tiny_settings
from trainer.back_update import back_update
from trainer.settings import LearnerSettings

Array = NDArray[np.float32]
SETTINGS = tiny_settings(back_epochs=10, back_learning_rate=0.01, back_batch=16, momentum=0.9)


def around(centre: list[float], count: int, seed: int) -> Array:
    return (np.array(centre) + 0.3 * np.random.default_rng(seed).normal(size=(count, 3))).astype(np.float32)


@pytest.fixture
def head() -> Head:
    """Two classes along the first axis; it has never heard of `ood`."""
    return Head(np.array([[2, 0, 0], [-2, 0, 0], [0, 0, 0]], np.float32), np.array([0, 0, -5], np.float32))


OWN = np.concatenate([around([2, 0, 0], 15, 0), around([-2, 0, 0], 15, 1)])
LABELS = np.repeat([0, 1], 15).astype(np.int64)
OTHERS = around([1, 3, 0], 40, 2)  # they look like the first class, but for the second axis


def update(
    head: Head, own: Array = OWN, others: Array = OTHERS, seed: int = 0, settings: LearnerSettings = SETTINGS
) -> Head:
    return back_update(head, own, LABELS[: len(own)], others, settings, np.random.default_rng(seed))


def test_an_earlier_head_learns_to_call_the_new_task_ood(head: Head) -> None:
    unseen = around([1, 3, 0], 100, 3)
    assert (head.logits(unseen).argmax(axis=1) == 2).mean() == 0
    after = update(head)
    assert (after.logits(unseen).argmax(axis=1) == 2).mean() > 0.95
    assert (after.logits(OWN).argmax(axis=1) == LABELS).mean() > 0.95


def test_own_images_stay_themselves_when_others_outnumber_them_twenty_to_one(head: Head) -> None:
    own = np.concatenate([OWN[:3], OWN[15:18]])
    labels = np.repeat([0, 1], 3).astype(np.int64)
    after = back_update(head, own, labels, around([1, 3, 0], 120, 4), SETTINGS, np.random.default_rng(0))
    assert (after.logits(OWN).argmax(axis=1) == LABELS).mean() > 0.95


def test_a_head_with_nothing_to_be_told_apart_from_stays_as_it_is(head: Head) -> None:
    nobody = np.zeros((0, 3), np.float32)
    assert update(head, others=nobody) is head
    assert update(head, own=nobody) is head


def test_the_same_randomness_gives_the_same_head(head: Head) -> None:
    one, same, other = update(head), update(head), update(head, seed=1)
    assert np.array_equal(one.weight, same.weight)
    assert np.array_equal(one.bias, same.bias)
    assert not np.array_equal(one.weight, other.weight)


def test_the_head_that_came_in_is_not_changed(head: Head) -> None:
    weight, bias = head.weight.copy(), head.bias.copy()
    after = update(head)
    assert np.array_equal(head.weight, weight)
    assert np.array_equal(head.bias, bias)
    assert after.weight.shape == weight.shape
    assert not np.array_equal(after.weight, weight)


def test_a_single_step_is_half_own_and_half_others(head: Head) -> None:
    """One epoch of one batch, no momentum: the gradient of Eq. backward worked out in numpy."""
    settings = tiny_settings(back_epochs=1, back_learning_rate=0.1, back_batch=8, momentum=0.0)
    own, others = OWN[:4], OTHERS[:4]
    after = update(head, own, others, settings=settings)
    x = np.concatenate([own, others]).astype(np.float64)
    logits = head.logits(x)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    error = (p - np.eye(3)[[0, 0, 0, 0, 2, 2, 2, 2]]) / 8
    np.testing.assert_allclose(after.weight, head.weight - 0.1 * error.T @ x, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after.bias, head.bias - 0.1 * error.sum(0), rtol=1e-5, atol=1e-6)
