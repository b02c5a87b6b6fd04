"""Which units of the shared adapters a task may use.

HAT lets every task choose from all units. Used ones cost nothing, so tasks take over more of them the more there are,
and the adapters grow faster and faster. Here a task chooses from a *window*: `bottleneck` free units, and at most as
many used ones, those that were taken last. A task is therefore never wider than two windows of the first one, the
adapters grow by one window per task at most, and the cost of training does not depend on the number of tasks.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from models.inference.shared_adapters import Adapters, SharedAdapters
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings


@dataclass(frozen=True)
class UnitWindow:
    """The units of each adapter that a task is trained in, in their order."""

    units: NDArray[np.int64]  # (A, W)

    @classmethod
    def choose(cls, shared: SharedAdapters, settings: LearnerSettings) -> Self:
        """All units, or with `windowed` some free and some used ones; `grow_adapters` has made free ones."""
        if not settings.recipe.windowed:
            return cls(np.tile(np.arange(shared.bottleneck), (len(shared.used1), 1)))
        size = settings.bottleneck
        used = shared.used1.astype(bool)
        width = size + min(size, int(used.sum(axis=1).max()))
        # Free units first, then used ones from the last to the first; an adapter with few used ones has more free ones.
        order = [
            np.concatenate([(free := np.flatnonzero(~own))[:size], np.flatnonzero(own)[::-1][:size], free[size:]])
            for own in used
        ]
        return cls(np.stack([np.sort(own[:width]) for own in order]))

    def cut(self, shared: SharedAdapters) -> SharedAdapters:
        """The adapters with the units of the window only."""
        a, units = shared.adapters, self.units
        columns = units[:, None, :]
        return SharedAdapters(
            Adapters(
                w1=np.take_along_axis(a.w1, units[:, :, None], axis=1),
                b1=np.take_along_axis(a.b1, units, axis=1),
                w2=np.take_along_axis(a.w2, columns, axis=2),
                b2=a.b2,
            ),
            np.take_along_axis(shared.used1, units, axis=1),
            shared.used2,
        )

    def put(self, shared: SharedAdapters, trained: SharedAdapters) -> SharedAdapters:
        """All adapters, with the units of the window as a training left them."""
        a, units = shared.adapters, self.units
        w1, b1, w2, used1 = a.w1.copy(), a.b1.copy(), a.w2.copy(), shared.used1.copy()
        np.put_along_axis(w1, units[:, :, None], trained.adapters.w1, axis=1)
        np.put_along_axis(b1, units, trained.adapters.b1, axis=1)
        np.put_along_axis(w2, units[:, None, :], trained.adapters.w2, axis=2)
        np.put_along_axis(used1, units, trained.used1, axis=1)
        return SharedAdapters(Adapters(w1, b1, w2, trained.adapters.b2), used1, trained.used2)


def grow_adapters(shared: SharedAdapters, settings: LearnerSettings) -> SharedAdapters:
    """Add units for the next task; existing units keep their index.

    With `windowed`, until every adapter has `bottleneck` free units, otherwise `bottleneck` at a time, until no adapter
    uses more than `grow_when_used`.
    """
    if settings.recipe.windowed:
        free = int((1 - shared.used1).sum(axis=1).min())
        return _with_units(shared, settings.bottleneck - free, settings) if free < settings.bottleneck else shared
    while shared.used_ratio >= settings.recipe.grow_when_used:
        shared = _with_units(shared, settings.bottleneck, settings)
    return shared


def _with_units(shared: SharedAdapters, more: int, settings: LearnerSettings) -> SharedAdapters:
    a, b, d = shared.adapters.w1.shape
    rng = random_stream(settings.seed, "adapters", b)
    w1, w2 = truncated_normal(rng, (a, more, d)), truncated_normal(rng, (a, d, more))
    zeros = np.zeros((a, more), np.float32)
    adapters = Adapters(
        w1=np.concatenate([shared.adapters.w1, w1], axis=1),
        b1=np.concatenate([shared.adapters.b1, zeros], axis=1),
        w2=np.concatenate([shared.adapters.w2, w2], axis=2),
        b2=shared.adapters.b2,
    )
    return SharedAdapters(adapters, np.concatenate([shared.used1, zeros], axis=1), shared.used2)


def initial_adapters(adapters: int, dimensions: int, settings: LearnerSettings) -> SharedAdapters:
    """Before the first task: W ~ trunc-normal(0.02), b = 0, no unit used."""
    a, d, b = adapters, dimensions, settings.bottleneck
    rng = random_stream(settings.seed, "adapters", 0)
    start = Adapters(
        w1=truncated_normal(rng, (a, b, d)),
        b1=np.zeros((a, b), np.float32),
        w2=truncated_normal(rng, (a, d, b)),
        b2=np.zeros((a, d), np.float32),
    )
    return SharedAdapters(start, np.zeros((a, b), np.float32), np.zeros((a, d), np.float32))


def truncated_normal(rng: np.random.Generator, shape: tuple[int, ...], std: float = 0.02) -> NDArray[np.float32]:
    """Normal draws within two standard deviations, the usual start of a transformer's weights."""
    draws = rng.standard_normal(shape)
    while (outside := np.abs(draws) > 2).any():
        draws[outside] = rng.standard_normal(int(outside.sum()))
    return (draws * std).astype(np.float32)
