"""Likeness groups: near-duplicate images, such as frames of one video, stay on one side of every split.

An image whose twin was trained on does not show how fresh images are recognised.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

# Cosine of two frozen features from which images count as near-duplicates. The nearest image of the class is nearer for
# about 7 % of Caltech's training images, which are independent, and for 70 % of Grocery's, many of one scene.
NEAR_DUPLICATE = 0.88
LEAST_GROUPS = 3  # per class, so that it can be split at all
BLOCK = 256  # images that are compared at once


def likeness_groups(
    features: NDArray[np.floating], labels: NDArray[np.integer], least: int = LEAST_GROUPS
) -> NDArray[np.int64]:
    """A group number for each image (n, f); groups do not cross classes, and a class has about `least` at least.

    An image joins the first group of its class whose first image is similar enough and that has room.
    """
    x = np.asarray(features, np.float64)
    x = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    groups, total = np.zeros(len(x), np.int64), 0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        own = _joined(x[rows], max(1, -(-len(rows) // least))) if _any_alike(x[rows]) else np.arange(len(rows))
        groups[rows] = total + own
        total += int(own.max()) + 1
    return groups


def _any_alike(x: NDArray[np.float64]) -> bool:
    """Whether any two images are near-duplicates: in most classes none are. In blocks, as a class may be large."""
    for start in range(0, len(x), BLOCK):
        similar = x[start : start + BLOCK] @ x[: start + BLOCK].T >= NEAR_DUPLICATE
        if np.tril(similar, start - 1).any():  # to an earlier image
            return True
    return False


def _joined(x: NDArray[np.float64], room: int) -> NDArray[np.int64]:
    """The group of each image of a class, in order."""
    groups, leaders, sizes = np.zeros(len(x), np.int64), list[int](), list[int]()
    for image, own in enumerate(x):
        similar = np.flatnonzero(x[leaders] @ own >= NEAR_DUPLICATE).tolist() if leaders else []
        group = next((group for group in similar if sizes[group] < room), len(leaders))
        if group == len(leaders):
            leaders.append(image)
            sizes.append(0)
        sizes[group] += 1
        groups[image] = group
    return groups


def independent_weights(features: NDArray[np.floating], labels: NDArray[np.integer]) -> NDArray[np.float64]:
    """What each image (n, f) says about fresh ones: near-duplicates of a class say as much as one image together."""
    groups = likeness_groups(features, labels, least=1)
    return 1 / np.bincount(groups)[groups].astype(np.float64)


def assign_folds(
    labels: Sequence[int] | NDArray[np.integer],
    groups: NDArray[np.integer],
    count: int,
    rng: np.random.Generator,
    counts: NDArray[np.integer] | None = None,
) -> NDArray[np.int64]:
    """The fold of each image: groups stay together, the images of a class are spread evenly, no fold holds all.

    The only group of a class is in no fold (-1): without it the class would be gone. `counts` are the images of each
    class (C,), by default those at hand.
    """
    labels = np.asarray(labels)
    folds = np.full(len(labels), -1, np.int64)
    if len(labels) == 0:
        return folds
    found, first = np.unique(np.sort(groups), return_index=True)
    members = dict(zip(found.tolist(), np.split(np.argsort(groups, kind="stable"), first[1:]), strict=True))
    for label in np.unique(labels):
        own = np.unique(groups[labels == label])
        if len(own) < 2 and (counts is None or counts[label] == len(members[int(own[0])])):
            continue
        sizes = np.zeros(count, np.int64)
        start = rng.permutation(count)
        for group in sorted(rng.permutation(own).tolist(), key=lambda g: -len(members[g])):
            fold = int(start[np.argmin(sizes[start])])
            folds[members[group]] = fold
            sizes[fold] += len(members[group])
    return folds
