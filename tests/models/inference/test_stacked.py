"""Stacked arrays give the scores of the tasks one by one, whatever the sizes of the tasks are."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.evidence import Evidence, FrozenScores
from models.inference.gaussians import Gaussians
from models.inference.model import Head
from models.inference.stacked import STACKED_TASKS, StackedScores, stacked_together
from tests.support.evidence import quick, seeds

D = 24
sizes = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=7)  # classes, images per class


def random_tasks(seed: int, chosen: Sequence[tuple[int, int]]) -> list[tuple[Gaussians, Head]]:
    rng = np.random.default_rng(seed)
    tasks = []
    for classes, images in chosen:
        labels = np.repeat(np.arange(classes), images)
        z = rng.normal(0, 1, (classes, D))[labels] + rng.normal(0, 0.5, (len(labels), D)) * np.linspace(0.2, 2, D)
        head = Head(*(rng.normal(0, 1, shape).astype(np.float32) for shape in ((classes + 1, D), (classes + 1,))))
        tasks.append((Gaussians.fit(z, labels, classes), head))
    return tasks


def looped(tasks: Sequence[tuple[Gaussians, Head]], z: NDArray[np.float32], frozen: FrozenScores) -> Evidence:
    scores = [gaussians.scores(own) for (gaussians, _), own in zip(tasks, z, strict=True)]
    logits = [head.logits(own) for (_, head), own in zip(tasks, z, strict=True)]
    return Evidence.of_tasks(logits, [pair[0] for pair in scores], [pair[1] for pair in scores], frozen)


def stacked(tasks: Sequence[tuple[Gaussians, Head]]) -> StackedScores:
    heads = [head for _, head in tasks]
    return StackedScores([own for own, _ in tasks], [head.weight for head in heads], [head.bias for head in heads])


def no_frozen(n: int, classes: int) -> FrozenScores:
    return FrozenScores(*(np.zeros((n, classes)) for _ in fields(FrozenScores)))


@quick
@given(seeds, sizes)
def test_stacked_tasks_score_as_one_by_one(seed: int, chosen: list[tuple[int, int]]) -> None:
    tasks, n = random_tasks(seed, chosen), 5
    z = np.random.default_rng(seed + 1).normal(0, 2, (len(tasks), n, D)).astype(np.float32)
    frozen = no_frozen(n, sum(classes for classes, _ in chosen))
    expected, found = looped(tasks, z, frozen), stacked(tasks).evidence(z, frozen)
    assert found.counts == expected.counts
    np.testing.assert_allclose(found.class_logits, expected.class_logits, atol=1e-4)
    np.testing.assert_allclose(found.ood_logits, expected.ood_logits, atol=1e-4)
    np.testing.assert_allclose(found.class_distances, expected.class_distances, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(found.class_cosines, expected.class_cosines, atol=1e-3)


def test_tasks_of_similar_sizes_are_stacked_together_and_others_apart() -> None:
    groups = stacked_together([(70, 5), (80, 5), (1200, 5), (75, 5), (0, 5)])
    assert [group.tolist() for group in groups] == [[0, 1, 3], [2], [4]]


def test_a_version_with_a_further_task_shares_the_full_stacks_and_scores_as_one_by_one() -> None:
    tasks = random_tasks(1, [(3, 4)] * (STACKED_TASKS + 2))
    before = stacked(tasks[:-1])
    heads = random_tasks(2, [(3, 4)] * len(tasks))  # of another version
    after = stacked([(gaussians, head) for (gaussians, _), (_, head) in zip(tasks, heads, strict=True)])
    assert after._stacks[0].gaussians is before._stacks[0].gaussians
    assert after._stacks[1].gaussians is not before._stacks[1].gaussians
    z = np.random.default_rng(0).normal(0, 2, (len(tasks), 3, D)).astype(np.float32)
    frozen = no_frozen(3, 3 * len(tasks))
    expected = looped([(own, head) for (own, _), (_, head) in zip(tasks, heads, strict=True)], z, frozen)
    np.testing.assert_allclose(after.evidence(z, frozen).class_logits, expected.class_logits, atol=1e-4)


def test_no_images_give_empty_scores() -> None:
    tasks = random_tasks(0, [(2, 3), (1, 9)])
    found = stacked(tasks).evidence(np.zeros((2, 0, D), np.float32), no_frozen(0, 3))
    assert (found.class_logits.shape, found.ood_logits.shape) == ((0, 3), (0, 2))


@pytest.mark.parametrize("images", [1, 2])
def test_classes_with_hardly_any_images_score_as_one_by_one(images: int) -> None:
    tasks = random_tasks(3, [(1, images), (3, images)])
    z = np.random.default_rng(0).normal(0, 2, (2, 4, D)).astype(np.float32)
    expected, found = looped(tasks, z, no_frozen(4, 4)), stacked(tasks).evidence(z, no_frozen(4, 4))
    np.testing.assert_allclose(found.class_distances, expected.class_distances, rtol=1e-3)
