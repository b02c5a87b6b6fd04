"""Cross-fit: with few images a class, every image is trained on, and each is also judged by a model that was not.

One held-out image calibrates nothing, and holding out more would starve the training. So the task is trained again
once a fold without that fold's images, only to see what they get from a network that has never met them. What is kept
of it is a difference, image by image, between being held out and being trained on; the fold's network is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from models.evidence import Evidence, gather
from models.model import Model
from trainer.fit import Fitted, TaskData
from trainer.memory import HeldOut, folds

if TYPE_CHECKING:
    from trainer.learner import Learner


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
        apart, together = _last_task(learner, without, keys), _last_task(learner, model, keys)
        for row, i in enumerate(inside):
            out.append(
                HeldOut(
                    key=data.keys[i],
                    label=classes[labels[i]],
                    logit_shift=tuple((apart.logits[0][row] - together.logits[0][row]).tolist()),
                    distance_ratio=tuple(_ratio(apart.distances[0][row], together.distances[0][row])),
                    frozen_ratio=tuple(_ratio(apart.frozen[row], together.frozen[row])),
                )
            )
    return out


def _last_task(learner: Learner, model: Model, keys: Sequence[str]) -> Evidence:
    """The evidence of the model's newest task alone."""
    evidence = gather(model, learner.features(model, keys))
    count = len(model.tasks[-1].classes)
    return Evidence(evidence.logits[-1:], evidence.distances[-1:], evidence.frozen[:, -count:])


def _ratio(apart: NDArray[np.float64], together: NDArray[np.float64]) -> list[float]:
    return [float(x) for x in apart / np.maximum(together, 1e-9)]
