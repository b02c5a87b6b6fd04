"""Likeness groups: images of one scene, such as frames of a video or photographs of one shelf, stay together.

A fresh image is seldom of a scene that was taught. An image whose scene was trained on does not show how fresh images
are recognised, so the images of a scene stay on one side of every split, and say as much as one image about fresh ones.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# An image belongs to a scene if the mean cosine of its frozen feature with those of the scene is as large as SCENE, and
# if its deviation from the class mean goes in their direction: images of a class of things that all look the same are
# alike without being of one scene. Near-duplicates belong together in any case. Chosen on training images: Caltech's,
# which are independent, are 703 scenes of 800 images, Grocery's, many of one shelf, 267.
NEAR_DUPLICATE, SCENE, SCENE_DEVIATION = 0.88, 0.78, 0.15
LEAST_GROUPS = 3  # per class of one scene, so that it can be split at all
BLOCK = 256  # images that are compared at once


def find_scenes(features: NDArray[np.floating], labels: NDArray[np.integer]) -> NDArray[np.int64]:
    """The number of each image's scene (n,); scenes do not cross classes."""
    x = _of_length_1(features)
    return _in_each_class(labels, lambda rows: _scenes(x[rows]))


def likeness_groups(
    features: NDArray[np.floating], labels: NDArray[np.integer], scenes: NDArray[np.int64] | None = None
) -> NDArray[np.int64]:
    """A group number for each image (n, f): its scene, as `find_scenes` says; groups do not cross classes.

    The images of a class that is one scene are divided into groups of near-duplicates, about LEAST_GROUPS at least.
    """
    of_scene = find_scenes(features, labels) if scenes is None else scenes
    x = _of_length_1(features)

    def divided(rows: NDArray[np.intp]) -> NDArray[np.int64]:
        found = of_scene[rows] - of_scene[rows].min()
        several = found.any() or len(rows) == 1
        return found if several else _near_duplicates(x[rows], max(1, -(-len(rows) // LEAST_GROUPS)))

    return _in_each_class(labels, divided)


def independent_weights(scenes: NDArray[np.integer]) -> NDArray[np.float64]:
    """What each image says about fresh ones: the images of a scene say as much as one image together."""
    out: NDArray[np.float64] = 1 / np.bincount(scenes)[scenes].astype(np.float64)
    return out


def groups_per_class(groups: NDArray[np.integer], labels: NDArray[np.integer], classes: int) -> NDArray[np.float64]:
    """How many groups each of the classes 0 .. classes - 1 has: (C,)."""
    _, first = np.unique(groups, return_index=True)
    return np.bincount(labels[first], minlength=classes).astype(np.float64)


def _in_each_class(
    labels: NDArray[np.integer], divide: Callable[[NDArray[np.intp]], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """The groups of all classes, numbered in the order of the classes; `divide` numbers those of one class from 0."""
    groups, total = np.zeros(len(labels), np.int64), 0
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        own = divide(rows)
        groups[rows] = total + own
        total += int(own.max()) + 1
    return groups


def _of_length_1(features: NDArray[np.floating]) -> NDArray[np.float64]:
    x = np.asarray(features, np.float64)
    out: NDArray[np.float64] = x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
    return out


def _scenes(x: NDArray[np.float64]) -> NDArray[np.int64]:
    """The scene of each image of a class, in order: it joins the scene that it is most like, if it is enough."""
    if not _any_alike(x):
        return np.arange(len(x))
    both = np.stack([x, _of_length_1(x - x.mean(axis=0))])  # features and deviations from the class mean
    sums, sizes, scenes = np.zeros_like(both), np.zeros(len(x)), np.zeros(len(x), np.int64)
    count = 0
    for image in range(len(x)):
        feature, deviation = (sums[:, :count] @ both[:, image, :, None])[..., 0] / sizes[:count]  # mean cosines
        excess = np.maximum(feature - NEAR_DUPLICATE, np.minimum(feature - SCENE, deviation - SCENE_DEVIATION))
        scene = int(excess.argmax()) if count and excess.max() >= 0 else count
        count = max(count, scene + 1)
        sums[:, scene] += both[:, image]
        sizes[scene] += 1
        scenes[image] = scene
    return scenes


def _any_alike(x: NDArray[np.float64]) -> bool:
    """Whether any two images may be of one scene: in most classes none are. In blocks, as a class may be large."""
    for start in range(0, len(x), BLOCK):
        similar = x[start : start + BLOCK] @ x[: start + BLOCK].T >= SCENE
        if np.tril(similar, start - 1).any():  # to an earlier image
            return True
    return False


def _near_duplicates(x: NDArray[np.float64], room: int) -> NDArray[np.int64]:
    """The group of each image of a class, in order: the first whose first image is similar enough and that has room."""
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
