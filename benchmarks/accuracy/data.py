"""An image set in one safetensors file: concatenated JPEG files, offsets and labels per split."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open


@dataclass(frozen=True)
class ImageSet:
    """Images by key `<split>/<index>`."""

    name: str
    classes: list[str]
    tensors: dict[str, NDArray[Any]]

    @classmethod
    def load(cls, path: Path) -> ImageSet:
        with safe_open(path, "numpy") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
            return cls(path.stem, json.loads(file.metadata()["classes"]), tensors)

    def read(self, key: str) -> bytes:
        split, index = key.split("/")
        start, end = self.tensors[f"{split}.offsets"][int(index) : int(index) + 2]
        data: bytes = self.tensors[f"{split}.bytes"][start:end].tobytes()
        return data

    def pick(self, split: str, label: int, count: int | None, rng: np.random.Generator) -> list[str]:
        """Up to `count` random images of a class (all of them when None)."""
        own = np.flatnonzero(self.tensors[f"{split}.labels"] == label)
        if count is not None and count < len(own):
            own = np.sort(rng.choice(own, count, replace=False))
        return [f"{split}/{i}" for i in own]


@dataclass(frozen=True)
class Stream:
    """A sequence of tasks, each class -> training keys, and test keys with their classes."""

    tasks: list[dict[str, list[str]]]
    test_keys: list[str]
    test_labels: list[str]

    @classmethod
    def make(cls, images: ImageSet, tasks: int, per_class: int | None, test_per_class: int | None, seed: int) -> Stream:
        """A random class order, cut into equal tasks."""
        rng = np.random.default_rng(seed)
        order = rng.permutation(len(images.classes))
        if len(order) % tasks:
            raise SystemExit(f"{len(order)} classes cannot be cut into {tasks} equal tasks")
        cut: Sequence[NDArray[np.int64]] = np.split(order, tasks)
        train = [{images.classes[c]: images.pick("train", int(c), per_class, rng) for c in part} for part in cut]
        test = [(key, images.classes[c]) for c in order for key in images.pick("test", int(c), test_per_class, rng)]
        return cls(train, [key for key, _ in test], [label for _, label in test])
