"""Cross-fit: with few images a class, every image is trained on, and each is also judged by a model that was not.

One held-out image calibrates nothing, and holding out more would starve the training. So the task is trained again
once a fold without that fold's images, only to see what they get from a network that has never met them. What is kept
of it is a difference, image by image, between being held out and being trained on; the fold's network is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import SMALLEST_DISTANCE
from models.inference.model import Model
from models.network.adapted_blocks import tensors_of
from trainer.learning.fit import Fitted, TaskData
from trainer.learning.memory import HeldOut, folds

if TYPE_CHECKING:
    from trainer.learning.learner import Learner


def cross_fit(
    learner: Learner,
    model: Model,
    classes: Sequence[str],
    data: TaskData,
    run: Callable[[TaskData, str], Fitted],
    assemble: Callable[[TaskData, Fitted], Model],
    name: str,
    rng: np.random.Generator,
) -> list[HeldOut]:
    """What each image of the new task, the last one of `model`, would have got as a held-out one."""
    labels = np.asarray(data.labels)
    fold_of = folds(data.labels, learner.settings.folds, rng)
    out: list[HeldOut] = []
    for fold in range(learner.settings.folds):
        inside, outside = np.flatnonzero(fold_of == fold).tolist(), np.flatnonzero(fold_of != fold).tolist()
        if len(inside) == 0 or set(labels[outside]) != set(labels):
            continue
        part = TaskData([data.keys[i] for i in outside], labels[outside].tolist(), data.classes, data.replay)
        without = assemble(part, run(part, f"{name}, fold {fold + 1} of {learner.settings.folds}"))
        keys = [data.keys[i] for i in inside]
        apart = _newest(learner, without, keys)
        together = _newest(learner, model, keys, labels[inside])
        out += [
            HeldOut(
                key=key,
                label=classes[labels[i]],
                logit_shift=tuple((apart.logits[row] - together.logits[row]).tolist()),
                distance_ratio=tuple((apart.distances[row] / together.distances[row]).tolist()),
            )
            for row, (i, key) in enumerate(zip(inside, keys, strict=True))
        ]
    return out


class _Newest(NamedTuple):
    """What the model's newest task says of some images."""

    logits: NDArray[np.float64]
    distances: NDArray[np.float64]


def _newest(learner: Learner, model: Model, keys: Sequence[str], labels: NDArray[np.int64] | None = None) -> _Newest:
    """`labels`: the images' classes, where the task's statistics were fitted on them too."""
    task = model.tasks[-1]
    z = learner.tokens.features(keys, tensors_of(task))
    distances = task.gaussians.distances(z) if labels is None else task.gaussians.distances_without(z, labels)
    return _Newest(task.head.logits(z), np.maximum(distances, SMALLEST_DISTANCE))
