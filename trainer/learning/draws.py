"""Draws from the class statistics, in place of features that a data folder does not keep.

The frozen statistics of a task are its class means and R'R, the scatter of its n images about them. If classes are
Gaussians with one covariance, every rotation of the n deviations is equally likely given these sums. A draw is a class
mean and a row of Q R, with Q (n, r) random, orthonormal, and of sum 0 over the images of a class. All draws of a task
together have exactly its means and its scatter, so they are left out of the statistics as the images would be: a draw
that stays in them is recognised too well. Their random features are, of those with the exact sums, the nearest to what
the backbone computes from them (Procrustes).

A draw is a frozen feature of a backbone with one token. It is also that token, but for a factor: networks see it with
the mean length of the images at hand. Turned images are not drawn.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from models.errors import KeepError
from models.inference.evidence import Array, Floats
from models.inference.factors import Factor
from models.inference.model import Model
from models.versions.backbone_spec import BackboneSpec
from tasks.batch import check_summed
from trainer.learning.memory import HeldOut, Samples
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

PREFIX = "drawn "  # of the key of a draw; no image has such a key
Counts = NDArray[np.int64]


def are_drawn(keys: Sequence[str]) -> NDArray[np.bool_]:
    """Which of the keys are draws: (n,)."""
    return np.array([key.startswith(PREFIX) for key in keys], bool)


def check_drawable(spec: BackboneSpec) -> None:
    """KeepError if the token of an image does not follow from its frozen feature."""
    if spec.is_transformer or spec.frozen.transform != "identity":
        raise KeepError(
            f"what {spec.name} computes cannot be drawn from class statistics: to keep statistics, use a CNN "
            "such as OPENWORLD_BACKBONE=tf_efficientnet_lite0 in a new data folder; or keep features"
        )


def check_summed_batch(gained: Mapping[str, Sequence[str]], corrected: Mapping[str, str], samples: Samples) -> None:
    """`BatchError` if sums before and after a batch reveal an image. `samples` has lost the corrected ones."""
    lost = Counter(corrected.values())
    left = {name: len(samples.seen.get(name, ())) for name in lost}
    check_summed({name: len(keys) for name, keys in gained.items()}, lost, left)


def with_draws(
    tokens: TokenCache, model: Model, samples: Samples, at_hand: Sequence[str], settings: LearnerSettings
) -> Samples:
    """The samples with draws of every learned class, half of them held out; `tokens` has their features from now on.

    As many per class as images would be kept, and not more than there were. The same statistics give the same draws.
    `at_hand` are images that can be read; without them, networks keep the scale of the draws that they have seen.
    """
    if at_hand:
        tokens.drawn_scale = _token_scale(tokens, at_hand)
    memory, held_out = dict(samples.memory), list(samples.held_out)
    for k, task in enumerate(model.tasks):
        keys = _draw_task(tokens, model, k, settings)
        for name, own in zip(task.classes, keys, strict=True):
            held_out += [HeldOut(key, name) for key in own[: len(own) // 2]]
            memory[name] = (*memory.get(name, ()), *own[len(own) // 2 :])
    return replace(samples, memory=memory, held_out=tuple(held_out))


def _draw_task(tokens: TokenCache, model: Model, task: int, settings: LearnerSettings) -> list[list[str]]:
    """The keys of the draws of a task, by class. Their names follow from the statistics: none is drawn twice."""
    own, sums = model.task_of_class == task, model.tasks[task].sums
    if sums is None:
        raise ValueError(f"the model was read for answering only: task {task} has no sums to draw from")
    counts, means, moments = (getattr(model.frozen, name)[own] for name in ("counts", "means", "moments"))
    sha256 = _sha256(counts, means.astype(np.float32), sums.scatter.rows)
    numbers = [min(count, settings.keep_per_class) for count in counts.tolist()]
    keys = [[f"{PREFIX}{sha256}/{c}/{i}" for i in range(number)] for c, number in enumerate(numbers)]
    if not tokens.has_drawn(keys[0][0]):
        projection = tokens.backbone.frozen.projection.cpu().numpy()
        deviations = drawn_deviations(sums.scatter, counts, random_stream(settings.seed, "draws", sha256))
        features = np.repeat(means, counts, axis=0) + deviations
        expanded = drawn_expansion(features, projection, sums.gram, moments, counts)
        for class_keys, first in zip(keys, np.cumsum(counts) - counts, strict=True):
            rows = slice(first, first + len(class_keys))
            tokens.add_drawn(class_keys, features[rows], expanded[rows])
    return keys


def drawn_deviations(scatter: Factor, counts: Counts, rng: np.random.Generator) -> Floats:
    """Deviations of n images from their class means, with this scatter, in the order of the classes: (n, f)."""
    rows = _largest(scatter, counts)
    rotation, _ = np.linalg.qr(_centred(rng.standard_normal((int(counts.sum()), len(rows))), counts))
    out: Floats = rotation @ rows
    return out


def drawn_expansion(features: Floats, projection: Array, gram: Factor, moments: Floats, counts: Counts) -> Floats:
    """Random features of draws, with exactly these sums: (n, M)."""
    means = moments / counts[:, None]
    rows = _largest(gram.changed(means * np.sqrt(counts)[:, None], -1), counts)
    wanted = _centred(np.maximum(features @ projection, 0.0), counts)
    left, _, right = np.linalg.svd(wanted @ rows.T, full_matrices=False)
    out: Floats = np.repeat(means, counts, axis=0) + (left @ right) @ rows
    return out


def _largest(factor: Factor, counts: Counts) -> Floats:
    """The rows of a factor, as many as the images have degrees of freedom about their class means."""
    rows = factor.rows[factor.signs > 0].astype(np.float64)
    largest = np.argsort(-(rows**2).sum(axis=1), kind="stable")[: int(counts.sum()) - len(counts)]
    return rows[np.sort(largest)]  # others are rounding


def _centred(rows: Floats, counts: Counts) -> Floats:
    """Rows in the order of their classes, less the mean of each class."""
    ends = np.cumsum(counts)
    parts = [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]
    return np.concatenate([part - part.mean(axis=0) for part in parts])


def _token_scale(tokens: TokenCache, images: Sequence[str]) -> float:
    """From a frozen feature, whose parts have one length, to the token of an image of mean length."""
    spec = tokens.backbone.spec
    pooled = tokens.get(images)[:, 0, : spec.dimensions].cpu().numpy()
    return float(np.linalg.norm(pooled, axis=1).mean()) * math.sqrt(len(spec.frozen.parts))


def _sha256(*arrays: NDArray[np.generic]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
