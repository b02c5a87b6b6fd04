"""Recompute the statistics of the current version from its images, where all of them are kept.

The frozen statistics are sums over every learned image. The Gaussians of a task are sums over the images that its
network was trained on; these are known if no held-out image was dropped since. Erased images cannot be recomputed:
their classes are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from models.errors import CorruptVersion, StoreError
from models.inference.frozen import FrozenStatistics
from models.inference.model_cache import ModelCache
from models.inference.predictor import Predictor
from models.inference.runtime import CHUNK, RuntimeCache
from models.storage import Storage
from models.versions.class_ids import samples_by_name
from models.versions.store import VersionStore
from openworld.check.report import Finding, Report
from tasks.images import ImageStore
from trainer.learning.memory import Samples

# Torch and ONNX Runtime differ by 1e-5 of a feature; a single wrong image changes a mean of 1000 by more than 1e-3.
TOLERANCE = 1e-3


def check_statistics(storage: Storage, report: Report) -> Iterator[Finding]:
    store = VersionStore(storage)
    try:
        if store.current() is None:
            return
        loaded = ModelCache(store).load()
        predictor = Predictor.from_version(loaded, RuntimeCache(store, "cpu"))
        by_name = samples_by_name(store.samples(loaded.manifest.version), loaded.manifest)
    except CorruptVersion:
        return  # reported by the check of versions
    samples, images, model = Samples.from_json(by_name).with_pending_seen(), ImageStore(storage), predictor.model
    subject = f"version {loaded.manifest.version}"
    counts = dict(zip(model.classes, model.frozen.counts.tolist(), strict=True))
    for name, count in counts.items():
        seen = len(samples.seen.get(name, ()))
        if count != seen:
            message = f"its statistics count {count} images, its list of learned images has {seen}"
            yield Finding("count_disagrees", f"{subject}, class {name!r}", message)
    whole = [name for name in model.classes if all(key in images for key in samples.seen.get(name, ()))]
    report.checked["classes"] = len(whole)
    if len(whole) < len(model.classes):
        left_out = len(model.classes) - len(whole)
        report.skipped["statistics"] = (
            f"{left_out} of {len(model.classes)} classes have images that are not kept, so theirs cannot be recomputed"
        )
    try:
        yield from _check_frozen(predictor, samples, images, whole, subject)
        yield from _check_gaussians(predictor, samples, images, whole, subject)
    except StoreError:
        return  # an image that was erased or damaged since; reported by the check of files


def _check_frozen(
    predictor: Predictor, samples: Samples, images: ImageStore, whole: Sequence[str], subject: str
) -> Iterator[Finding]:
    model = predictor.model
    keys = [key for name in whole for key in samples.seen[name]]
    if not keys:
        return
    labels = np.repeat(np.arange(len(whole)), [len(samples.seen[name]) for name in whole])
    columns = [model.classes.index(name) for name in whole]
    parts = list(_features(predictor, images, keys, task=None))
    feature, expanded = (np.concatenate(part) for part in zip(*parts, strict=True))
    again = FrozenStatistics.fit(feature, expanded, labels, len(whole))
    for place, name in enumerate(whole):
        for what, stored, computed in (
            ("mean", model.frozen.means[columns[place]], again.means[place]),
            ("moments", model.frozen.moments[columns[place]], again.moments[place]),
        ):
            if not _close(stored, computed):
                yield Finding(
                    "statistics_disagree", f"{subject}, class {name!r}", f"the {what} is not that of its images"
                )
    if len(whole) == len(model.classes):
        for what, stored, computed in (
            ("scatter", model.frozen.scatter, again.scatter),
            ("gram", model.frozen.gram, again.gram),
        ):
            if not _close(stored, computed):
                yield Finding("statistics_disagree", f"{subject}, {what}", "it is not that of the learned images")


def _check_gaussians(
    predictor: Predictor, samples: Samples, images: ImageStore, whole: Sequence[str], subject: str
) -> Iterator[Finding]:
    held_out = {sample.key for sample in samples.held_out}
    for k, task in enumerate(predictor.model.tasks):
        for c, name in enumerate(task.classes):
            trained = [key for key in samples.seen.get(name, ()) if key not in held_out]
            if name not in whole or len(trained) != task.gaussians.counts[c]:
                continue
            mean = np.concatenate([z for (z,) in _features(predictor, images, trained, task=k)]).mean(axis=0)
            if not _close(task.gaussians.means[c], mean):
                message = f"the mean of task {k + 1} is not that of its images"
                yield Finding("statistics_disagree", f"{subject}, class {name!r}, task {k + 1}", message)


def _features(
    predictor: Predictor, images: ImageStore, keys: Sequence[str], task: int | None
) -> Iterator[tuple[NDArray[np.float32], ...]]:
    """Per chunk of images: feature and random features of the frozen backbone, or the feature of one task."""
    for start in range(0, len(keys), CHUNK):
        pixels = np.stack([predictor.decode(images.read(key)) for key in keys[start : start + CHUNK]])
        tokens = predictor.runtime.tokens(pixels)
        if task is None:
            yield predictor.runtime.frozen_features(tokens)
        else:
            yield (predictor.runtime.task_features(tokens, predictor.model.tasks[task]),)


def _close(stored: NDArray[np.floating], computed: NDArray[np.floating]) -> bool:
    scale = max(float(np.abs(computed).max(initial=0.0)), 1e-12)
    return bool(np.abs(np.asarray(stored, np.float64) - computed).max(initial=0.0) <= TOLERANCE * scale)
