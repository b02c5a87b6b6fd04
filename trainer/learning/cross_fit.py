"""Cross-fit: with few images per class, train on every image and still score each with a network that has not seen it.

A single held-out image cannot calibrate a class, and holding out more would leave too few to train on. So the task is
trained once more per fold without the images of the fold. For each image the difference between being held out and
being trained on is kept; the fold's network is discarded.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from models.inference.evidence import SMALLEST_DISTANCE, Floats
from models.inference.model import Model
from models.network.adapted_blocks import tensors_of
from trainer.learning.memory import HeldOut
from trainer.learning.tokens import TokenCache
from trainer.learning.train_task import TaskData

Train = Callable[[TaskData, str], Model]  # trains the newest task on other data, in a phase of this name


def cross_fit(
    tokens: TokenCache, model: Model, data: TaskData, train: Train, name: str, folds: int, rng: np.random.Generator
) -> list[HeldOut]:
    """What training on each image of the newest task `name` changes in its evidence."""
    classes, labels = model.tasks[-1].classes, np.asarray(data.labels)
    fold_of = assign_folds(data.labels, folds, rng)
    out: list[HeldOut] = []
    for fold in range(folds):
        inside, outside = np.flatnonzero(fold_of == fold).tolist(), np.flatnonzero(fold_of != fold).tolist()
        if len(inside) == 0 or set(labels[outside]) != set(labels):
            continue
        rest = data._replace(keys=[data.keys[i] for i in outside], labels=labels[outside].tolist())
        keys = [data.keys[i] for i in inside]
        held_out = _newest_evidence(tokens, train(rest, f"{name}, fold {fold + 1} of {folds}"), keys)
        trained_on = _newest_evidence(tokens, model, keys, labels[inside])
        shifts, ratios = held_out[0] - trained_on[0], held_out[1] / trained_on[1]
        out += [
            HeldOut(key, classes[labels[i]], tuple(shift.tolist()), tuple(ratio.tolist()))
            for i, key, shift, ratio in zip(inside, keys, shifts, ratios, strict=True)
        ]
    return out


def assign_folds(labels: Sequence[int], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """The fold of each image; the images of a class are spread evenly."""
    out = np.zeros(len(labels), np.int64)
    for label in np.unique(labels):
        own = rng.permutation(np.flatnonzero(np.asarray(labels) == label))
        out[own] = np.arange(len(own)) % count
    return out


def _newest_evidence(
    tokens: TokenCache, model: Model, keys: Sequence[str], fitted_labels: NDArray[np.int64] | None = None
) -> tuple[Floats, Floats]:
    """Logits and distances of the newest task; `fitted_labels` if its statistics were fitted on these images."""
    task = model.tasks[-1]
    z = tokens.features(keys, tensors_of(task))
    if fitted_labels is None:
        distances = task.gaussians.distances(z)
    else:
        distances = task.gaussians.distances_without(z, fitted_labels)
    return task.head.logits(z), np.maximum(distances, SMALLEST_DISTANCE)
