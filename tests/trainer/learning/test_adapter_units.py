"""The window of units that a task chooses from: it bounds the width of a task and the growth of the adapters."""

from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from models.inference.shared_adapters import Adapters, SharedAdapters
from models.network import hat
from tests.support.tiny_model import class_tasks, learn_tasks, tiny_learner, tiny_settings
from trainer.learning.adapter_units import UnitWindow, grow_adapters, initial_adapters

SETTINGS = tiny_settings(windowed=True, bottleneck=4)


def adapters(used: list[list[int]], dimensions: int = 3) -> SharedAdapters:
    """Adapters with these used units, and other numbers everywhere."""
    a, b, d = len(used), len(used[0]), dimensions
    rng = np.random.default_rng(0)
    shapes = ((a, b, d), (a, b), (a, d, b), (a, d))
    parts = [rng.standard_normal(shape).astype(np.float32) for shape in shapes]
    return SharedAdapters(Adapters(*parts), np.array(used, np.float32), np.zeros((a, d), np.float32))


def test_the_first_task_chooses_from_all_units() -> None:
    start = initial_adapters(2, 3, SETTINGS)
    assert UnitWindow.choose(start, SETTINGS).units.tolist() == [[0, 1, 2, 3]] * 2


def test_a_window_has_free_units_and_those_that_were_taken_last() -> None:
    shared = adapters([[1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
    units = UnitWindow.choose(shared, SETTINGS).units
    assert units[0].tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    assert units[1].tolist() == [0, 1, 2, 3, 4, 5, 6, 7]  # few used ones: more free ones


def test_what_is_outside_of_the_window_stays() -> None:
    shared = adapters([[1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 0, 1, 0, 0, 0]])
    window = UnitWindow.choose(shared, SETTINGS)
    cut = window.cut(shared)
    assert cut.adapters.w1.shape == (2, 8, 3)
    same = window.put(shared, cut)
    for name in ("w1", "b1", "w2", "b2"):
        assert np.array_equal(getattr(same.adapters, name), getattr(shared.adapters, name))
    changed = Adapters(cut.adapters.w1 + 1, cut.adapters.b1 + 1, cut.adapters.w2 + 1, cut.adapters.b2)
    after = window.put(shared, SharedAdapters(changed, np.ones_like(cut.used1), cut.used2))
    inside = np.zeros((2, 10), bool)
    np.put_along_axis(inside, window.units, True, axis=1)
    assert np.array_equal(after.adapters.w1 != shared.adapters.w1, np.broadcast_to(inside[:, :, None], (2, 10, 3)))
    assert np.array_equal(after.adapters.w2 != shared.adapters.w2, np.broadcast_to(inside[:, None, :], (2, 3, 10)))
    assert np.array_equal(after.used1 == 1, inside | (shared.used1 == 1))


def test_adapters_grow_by_the_missing_free_units() -> None:
    full = adapters([[1, 1, 1, 0], [1, 0, 0, 0]])
    grown = grow_adapters(full, SETTINGS)
    assert grown.bottleneck == 7  # one free unit and three new ones in the fullest adapter
    assert grow_adapters(grown, SETTINGS) is grown
    assert np.array_equal(grown.adapters.w1[:, :4], full.adapters.w1)


def test_the_width_of_tasks_is_bounded_and_the_adapters_grow_linearly() -> None:
    learned = learn_tasks(tiny_learner(windowed=True, bottleneck=4), class_tasks([1] * 8))
    model = learned[-1].model
    assert max(task.adapters.w1.shape[1] for task in model.tasks) <= 8
    widths = [one.model.shared.bottleneck for one in learned]
    assert max(after - before for before, after in pairwise(widths)) <= 4
    assert widths[-1] > 4


def test_a_unit_costs_the_same_however_many_are_free() -> None:
    masks, free = [torch.ones(1, 4)], torch.tensor([[1.0, 1.0, 0.0, 0.0]])
    assert hat.sparsity(masks, [free]).item() == 1.0
    assert hat.sparsity(masks, [free], constant_price=True).item() == 0.5
    assert hat.sparsity(masks, [torch.zeros(1, 4)], constant_price=True).item() == 1.0
