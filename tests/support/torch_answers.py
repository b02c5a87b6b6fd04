"""Comparing answers of ONNX Runtime with those of torch, and tasks of CIFAR-10 to compare them on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from benchmarks.accuracy.data import ImageSet
from models.inference.answer import answer
from models.inference.evidence import Features
from models.inference.model import Model
from tests.support.exported import TOLERANCE, Exported, Floats, Tasks
from tests.support.paths import SHARED


def load_cifar10() -> ImageSet:
    return ImageSet.load(SHARED / "data" / "cifar10.safetensors")


def difference(one: Features, other: Features) -> float:
    first, second = (
        (*features.tasks, features.frozen, features.expanded, *([] if features.refined is None else [features.refined]))
        for features in (one, other)
    )
    pairs = zip(first, second, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def assert_same_answers(exported: Exported, model: Model, pixels: Floats, in_torch: Callable[[], Features]) -> None:
    """Features within the tolerance, and the same label and novel flag for every image."""
    assert len(pixels) >= 300
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_torch)
        served = exported.runtime.features(model, pixels)
        trained = waiting.result()
    assert difference(trained, served) < TOLERANCE
    ours, theirs = answer(model, model.evidence(served)), answer(model, model.evidence(trained))
    assert [(a.label, a.novel) for a in ours] == [(a.label, a.novel) for a in theirs]
    # Both known and novel answers, so that the comparison is meaningful.
    assert {a.novel for a in ours} == {True, False}
    assert len({a.label for a in ours}) > 2


def cifar10_tasks(images: ImageSet, per_class: int, tasks: Sequence[Sequence[int]]) -> Tasks:
    rng = np.random.default_rng(0)
    return [{images.classes[c]: images.pick("train", c, per_class, rng) for c in task} for task in tasks]


def cifar10_test(images: ImageSet) -> list[bytes]:
    rng = np.random.default_rng(1)
    return [images.read(key) for c in range(10) for key in images.pick("test", c, 30, rng)]
