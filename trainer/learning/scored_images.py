"""Scores of images under the network and the head of a learned task, kept in memory for the next task.

Both stay the same for nearly all tasks when another one is learned, and so do most of the images that a version is
fitted on. An image has the same scores whichever images and tasks are scored with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import Evidence, Floats, FrozenScores
from models.inference.model import Model, TaskModel
from models.inference.stacked import StackedScores, has_ood
from trainer.learning.reproducibility import blas_threads

KEPT_CALLS = 4  # of a version and of its parent, for this task and for the one before
ROWS = 32  # images scored at once: the last bits of a product depend on the number of its rows

# Image keys and G tasks to features (G, n, d).
FeaturesOf = Callable[[Sequence[str], Sequence[TaskModel]], NDArray[np.float32]]


@dataclass
class _Scored:
    """Images under one network and head: class logits, `ood` logit, distances and cosines side by side."""

    task: TaskModel  # its parts are compared by identity, so they must not be freed
    used: int = 0  # the last call
    places: dict[str, int] = field(default_factory=dict)  # image key -> row

    def __post_init__(self) -> None:
        self._rows = np.zeros((0, 3 * len(self.task.classes) + 1))

    @cached_property
    def _scores(self) -> StackedScores:
        return StackedScores([self.task.gaussians], [self.task.head.weight], [self.task.head.bias])

    def add(self, keys: Sequence[str], features: NDArray[np.float32]) -> None:
        new = []
        for start in range(0, len(keys), ROWS):
            part = keys[start : start + ROWS]
            chunk = np.zeros((1, ROWS, features.shape[1]), np.float32)
            chunk[0, : len(part)] = features[start : start + ROWS]
            new.append(np.concatenate(self._scores.scores(chunk), axis=1)[: len(part)])
        self.places |= {key: len(self._rows) + place for place, key in enumerate(keys)}
        self._rows = np.concatenate([self._rows, *new])

    def of(self, keys: Sequence[str]) -> Floats:
        """(n, 3c + 1)"""
        return self._rows[[self.places[key] for key in keys]]

    def keep_only(self, keys: Collection[str]) -> None:
        kept = [key for key in self.places if key in keys]
        self._rows, self.places = self.of(kept), {key: place for place, key in enumerate(kept)}


class ScoredImages:
    def __init__(self) -> None:
        self._scored: dict[tuple[int, int, bytes], _Scored] = {}
        self._calls = 0

    def keep_only(self, keys: Collection[str]) -> None:
        """Forget all other images."""
        for scored in self._scored.values():
            scored.keep_only(keys)

    def evidence(self, model: Model, keys: Sequence[str], frozen: FrozenScores, features_of: FeaturesOf) -> Evidence:
        """The evidence of n images with these frozen scores, of all networks; without rotations."""
        self._calls += 1
        scored = [self._of(task) for task in model.tasks]
        missing: dict[tuple[str, ...], list[_Scored]] = {}  # few different ones: all images, or the new ones
        for own in scored:
            if absent := tuple(key for key in keys if key not in own.places):
                missing.setdefault(absent, []).append(own)
        with blas_threads(1):
            for absent, group in missing.items():
                for own, z in zip(group, features_of(absent, [own.task for own in group]), strict=True):
                    own.add(absent, z)
        self._scored = {at: own for at, own in self._scored.items() if own.used > self._calls - KEPT_CALLS}
        values = [own.of(keys) for own in scored]
        counts = tuple(len(task.classes) for task in model.tasks)
        cut = [np.split(own, [c, c + 1, 2 * c + 1], axis=1) for own, c in zip(values, counts, strict=True)]
        logits, ood, distances, cosines = (np.concatenate(part, axis=1) for part in zip(*cut, strict=True))
        heads = [task.head.bias for task in model.tasks]
        return Evidence(counts, logits, ood, distances, cosines, frozen, has_ood=has_ood(heads))

    def _of(self, task: TaskModel) -> _Scored:
        head = sha256(task.head.weight.tobytes() + task.head.bias.tobytes()).digest()
        scored = self._scored.setdefault((id(task.adapters), id(task.gaussians), head), _Scored(task))
        scored.used = self._calls
        return scored
