"""Low-rank parts of the frozen statistics: they add up to the whole sums, and hold no image's feature."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.evidence import Floats
from models.inference.factors import Factor, TaskSums, add_factors, add_sums, symmetric
from models.inference.frozen import FrozenStatistics
from models.inference.model import Model
from tests.support.evidence import quick, seeds
from tests.support.tiny_model import bare_model

F, M = 7, 5


def images(rng: np.random.Generator, labels: NDArray[np.int64]) -> tuple[Floats, Floats]:
    return rng.normal(size=(len(labels), F)) + labels[:, None], np.maximum(rng.normal(size=(len(labels), M)), 0)


def empty_model(tasks: list[list[str]]) -> Model:
    model = bare_model(tasks, frozen=FrozenStatistics.empty(F, M))
    return replace(model, tasks=tuple(replace(task, sums=TaskSums.empty(F, M)) for task in model.tasks))


def summed(model: Model) -> tuple[Floats, Floats]:
    scatter, gram = np.zeros((F, F)), np.zeros((M, M))
    add_sums([task.sums for task in model.tasks if task.sums], scatter, gram)
    return scatter, gram


@quick
@given(seeds, st.lists(st.integers(1, 5), min_size=2, max_size=6))
def test_the_parts_of_the_tasks_add_up_to_the_statistics_of_all(seed: int, counts: list[int]) -> None:
    """Also after further images of known classes, and without images that are removed again."""
    rng, names = np.random.default_rng(seed), [f"class {c}" for c in range(len(counts))]
    model = empty_model([names[:2], names[2:]] if len(names) > 2 else [names])
    labels = np.repeat(np.arange(len(counts)), counts)
    model = model.with_images(*images(rng, labels), labels)
    more = rng.integers(0, len(counts), 9)
    added = images(rng, more)
    model = model.with_images(*added, more)
    gone = rng.permutation(9)[:4]
    model = model.without_images(added[0][gone], added[1][gone], more[gone])
    for part, whole in zip(summed(model), (model.frozen.scatter, model.frozen.gram), strict=True):
        np.testing.assert_allclose(part, whole, atol=1e-5 * np.abs(whole).max())


def test_only_the_tasks_of_the_images_change() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(4), 3)
    model = empty_model([["a", "b"], ["c", "d"]]).with_images(*images(rng, labels), labels)
    more = np.array([2, 3])
    later = model.with_images(*images(rng, more), more)
    assert later.tasks[0].sums is model.tasks[0].sums
    assert later.tasks[1].sums is not model.tasks[1].sums


def test_a_factor_has_no_more_rows_than_images_or_dimensions_and_none_is_an_image() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4, F))
    factor = Factor.empty(F).changed(rows, 1)
    assert factor.rows.shape == (4, F)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosines = np.abs(unit @ (factor.rows / np.linalg.norm(factor.rows, axis=1, keepdims=True)).T)
    assert cosines.max() < 0.99
    for _ in range(3):
        factor = factor.changed(rng.normal(size=(6, F)), 1)
    assert factor.rows.shape == (F, F)


def test_images_that_only_a_base_contains_can_be_removed() -> None:
    rng = np.random.default_rng(0)
    base, gone = rng.normal(size=(6, F)), rng.normal(size=(2, F))
    whole = base.T @ base + gone.T @ gone
    add_factors([Factor.empty(F).changed(gone, -1)], whole)
    np.testing.assert_allclose(whole, base.T @ base, atol=1e-5)


def test_a_triangle_of_another_size_is_refused() -> None:
    matrix = symmetric(np.arange(6, dtype=np.float32), 3)
    assert np.array_equal(matrix, matrix.T)
    with pytest.raises(ValueError, match="shape"):
        symmetric(np.arange(5, dtype=np.float32), 3)
