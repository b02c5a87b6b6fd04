"""What a task leaves in the shared adapters: stored as the entries that were free, and exact when it is read back."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from models.inference.shared_adapters import PARTS, Adapters, AdapterUpdate, SharedAdapters

A, D = 2, 5


def trained(before: SharedAdapters, units: int, seed: int) -> SharedAdapters:
    """Random changes of the free entries, in adapters with this number of units, and further used units."""
    rng, (old1, old2) = np.random.default_rng(seed), (before.used1.astype(bool), before.used2.astype(bool))
    unit = np.zeros((A, units), bool)
    unit[:, : before.bottleneck] = old1
    shapes: dict[str, tuple[int, ...]] = {"w1": (A, units, D), "b1": (A, units), "w2": (A, D, units), "b2": (A, D)}
    used: dict[str, NDArray[np.bool_]] = {
        "w1": np.broadcast_to(unit[:, :, None], shapes["w1"]),
        "b1": unit,
        "w2": old2[:, :, None] & unit[:, None, :],
        "b2": old2,
    }
    parts = {}
    for name in PARTS:
        old, new = getattr(before.adapters, name), rng.normal(size=shapes[name]).astype(np.float32)
        padded = np.zeros(shapes[name], np.float32)
        padded[tuple(slice(size) for size in old.shape)] = old
        parts[name] = np.where(used[name], padded, new)
    masks = [(mask | (rng.random(mask.shape) < 0.3)).astype(np.float32) for mask in (unit, old2)]
    return SharedAdapters(Adapters(**parts), *masks)


def test_the_updates_of_all_tasks_give_the_adapters_of_the_last_one_in_every_bit() -> None:
    before, again = SharedAdapters.empty(A, D), SharedAdapters.empty(A, D)
    sizes = []
    for seed, units in enumerate((4, 4, 7, 7, 7)):
        after = trained(before, units, seed)
        update = AdapterUpdate.between(before, after)
        again = AdapterUpdate.from_tensors(update.tensors()).applied(again)
        sizes.append(sum(len(values) for values in update.values.values()))
        before = after
    for name, tensor in before.tensors().items():
        assert np.array_equal(again.tensors()[name], tensor), name
    assert sizes[1] < sizes[0]  # entries of earlier tasks are not stored again
    assert sizes[4] < sizes[3]


def test_a_change_of_an_entry_that_an_earlier_task_uses_is_refused() -> None:
    first = trained(SharedAdapters.empty(A, D), 4, 0)
    used = replace(first, used1=np.ones_like(first.used1))
    after = trained(used, 4, 1)
    w1 = after.adapters.w1.copy()
    w1[0, 0, 0] += 1
    with pytest.raises(ValueError, match="an earlier task uses"):
        AdapterUpdate.between(used, replace(after, adapters=replace(after.adapters, w1=w1)))
