"""Streams of tasks, and the suites of cells that the benchmark runs.

A cell is one training on one stream: (suite, data set, images per class, class order, training group).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.accuracy.data import MADE, ImageSet

LITE0, DEIT = "tf_efficientnet_lite0", "deit_tiny_patch16_224"
TEST_IMAGES = 25  # per class, at most
UNKNOWN_TEST_IMAGES = {"tiny_imagenet": 10}  # per class that is never learned, at most; it has 160 of them
GROUPS = ("ours", "paper", "hat", "closed", "product-v1")


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks, each class -> training keys, and test images of learned and of other classes."""

    tasks: list[dict[str, list[str]]]
    test_keys: list[str]
    labels: NDArray[np.int64]  # the place of each test image's class in learning order; -1 if it is never learned

    @property
    def classes(self) -> list[str]:
        """All learned classes in learning order: the columns of every score."""
        return [name for task in self.tasks for name in task]

    @classmethod
    def make(cls, images: ImageSet, tasks: int, classes: int, per_class: int, seed: int) -> Stream:
        """`tasks` times `classes` random classes, the others unknown; training and test images by the seed."""
        rng = np.random.default_rng(seed)
        order = [int(c) for c in rng.permutation(len(images.classes))]
        if tasks * classes > len(order):
            raise ValueError(f"{images.name} has {len(order)} classes, not {tasks * classes}")
        learned = order[: tasks * classes]
        train = {images.classes[c]: images.pick("train", c, per_class, rng) for c in learned}
        names = list(train)
        cut = [sorted(names[start : start + classes]) for start in range(0, len(names), classes)]
        place = {name: number for number, name in enumerate(name for part in cut for name in part)}
        keys: list[str] = []
        labels: list[int] = []
        for c in order:
            label = place.get(images.classes[c], -1)
            most = TEST_IMAGES if label >= 0 else UNKNOWN_TEST_IMAGES.get(images.name, TEST_IMAGES)
            own = images.pick("test", c, most, rng)
            keys += own
            labels += [label] * len(own)
        stream = [{name: train[name] for name in part} for part in cut]
        return cls(stream, keys, np.array(labels, np.int64))


@dataclass(frozen=True)
class Suite:
    about: str
    sets: Mapping[str, tuple[int, int]]  # data set -> tasks, classes per task
    per_class: Sequence[int]
    orders: int
    groups: Sequence[str] = GROUPS
    backbone: str = LITE0
    blocks: int | None = None  # that are adapted, if not all


ALL_SETS = {"cifar10": (4, 2), "tiny_imagenet": (8, 5), "grocery_store": (8, 5), "caltech": (8, 5)}
SUITES = {
    "main": Suite("20 images per class", ALL_SETS, (20,), 3),
    "few": Suite("5 and 10 images per class", ALL_SETS, (5, 10), 3),
    "many": Suite("50 images per class", {name: ALL_SETS[name] for name in ("cifar10", "tiny_imagenet")}, (50,), 3),
    "long": Suite("20 tasks", {"tiny_imagenet": (20, 5)}, (20,), 3),
    "single": Suite("one class per task", {"caltech": (20, 1)}, (20,), 1, ("ours", "closed")),
    "deit": Suite("DeiT-Ti, 12 adapted blocks", {"cifar10": (5, 2), "grocery_store": (5, 5)}, (20,), 2, backbone=DEIT),
    "without-images": Suite(
        "methods that keep no image, 20 images per class",
        {name: ALL_SETS[name] for name in ("cifar10", "grocery_store", "caltech")},
        (20,),
        3,
        ("ours", "paper", "hat-ce", "sup-ce", "hat-csi", "sup-csi", "hat-csi-statistics"),
    ),
    "without-images-deit": Suite(
        "methods that keep no image, DeiT-Ti with 2 adapted blocks, 20 images per class",
        {"cifar10": (5, 2)},
        (20,),
        1,
        ("ours", "paper", "hat-ce", "sup-ce", "hat-csi", "sup-csi"),
        DEIT,
        blocks=2,  # eight turned views of an image through all twelve would take hours
    ),
    "short": Suite("minutes, for CI", {"caltech": (3, 5)}, (20,), 1, ("ours", "paper", "closed")),
}
MADE_SHORT = Suite("minutes, for CI, on generated images", {MADE: (3, 4)}, (10,), 1, ("ours", "paper", "closed"))


@dataclass(frozen=True)
class Cell:
    suite: str
    data: str
    per_class: int
    order: int
    group: str
    tasks: int
    classes: int  # per task
    backbone: str
    blocks: int | None = None

    @property
    def name(self) -> str:
        return f"{self.suite}-{self.data}-{self.per_class}-{self.order}-{self.group}"


def cells(names: Sequence[str], data: Path, patterns: Sequence[str] = ()) -> list[Cell]:
    """The cells of the suites, by data set, so that each is loaded once; those that match a pattern, if given."""
    found = []
    for name in names:
        suite = SUITES[name]
        if name == "short" and not (data / "caltech.safetensors").is_file():
            suite = MADE_SHORT
        found += [
            Cell(name, image_set, per_class, order, group, *size, suite.backbone, suite.blocks)
            for image_set, size in suite.sets.items()
            for per_class in suite.per_class
            for order in range(suite.orders)
            for group in suite.groups
        ]
    chosen = [c for c in found if not patterns or any(fnmatch.fnmatch(c.name, pattern) for pattern in patterns)]
    return sorted(chosen, key=lambda cell: (cell.backbone, cell.data))


def open_set(cell: Cell, data: Path) -> ImageSet:
    if cell.data == MADE:
        return ImageSet.made(classes=20, train=10, test=10)
    return ImageSet.load(data / f"{cell.data}.safetensors")
