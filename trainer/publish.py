"""From a labelled batch to a published version: the one way in which a data folder learns.

**Killed at any moment, the current version is whole, and the same call goes on from the last finished epoch and ends
with the same bytes. A call that fails leaves the current version as it was, and takes away what it had put in place.**
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from models import files
from models.errors import BackboneError, NothingLearned, StaleParent, StoreError
from models.inference.loading import read_model
from models.inference.model import Model
from models.network.backbone import Backbone, open_backbone
from models.network.export import export
from models.versions.edits import unusable
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tasks.batch.check import LabelledBatch
from tasks.errors import BatchError
from tasks.images.store import ImageStore
from trainer.attempt import Undo, alone
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.gate import Verdict
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import Samples, check_size, unseen
from trainer.learning.progress import Listener, Progress
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import Tokens
from trainer.learning.torch_setup import set_up_torch

log = logging.getLogger(__name__)

WORKING_SPACE = 64 * 2**20  # a task's checkpoints and its share of the next version
NEW_FOLDER_SPACE = 256 * 2**20  # the backbone and its graphs, when their size is not known beforehand

LOCAL = {"backbone_weights", "device"}  # settings that mean something on one machine only
# What comes after the epochs that a checkpoint holds: a rejected task can be judged again by other margins at once.
AFTERWARDS = {"accept", "rule", "gate_accuracy", "gate_auc"}


@dataclass(frozen=True)
class Outcome:
    """What became of a batch. A rejected one has no version: its manifest says 0."""

    state: Literal["published", "rejected", "already learned"]
    manifest: Manifest
    folder: Path  # where it is kept
    verdict: Verdict | None = None  # None when it was learned before
    model: Model | None = None


@dataclass(frozen=True)
class _Parent:
    """What the next version is built on; before the first one, nothing but an empty model."""

    version: int | None
    task_id: str | None
    model: Model
    samples: Samples
    lost: tuple[str, ...] = ()  # images that its samples named, and that were deleted since


def learn_batch(
    root: Path,
    batch: LabelledBatch,
    settings: LearnerSettings,
    listener: Listener,
    *,
    images_stored: bool = False,
    patience: float | None = None,
) -> Outcome:
    """Learn the batch as the next task of the data folder, and publish the version unless the gate rejects it.

    `images_stored`: the image store of `root` holds the batch's images already; nothing is read from the batch.
    `patience` is for a worker whose task nobody else may learn: see `alone`.
    """
    store = VersionStore(root)
    if done := _already_learned(store, batch):
        return done
    weights = settings.backbone_weights
    _check_labels(store, batch)
    if weights is not None and not weights.is_file():
        raise BackboneError(f"no weights file at {weights}: check OPENWORLD_BACKBONE_WEIGHTS")
    _check_memory(store, batch, settings)
    _check_space(store, 0 if images_stored else batch.total_bytes, settings)
    undo = Undo(root)
    with alone(root, patience):
        if done := _already_learned(store, batch):  # by the one who held the lock before us
            return done
        try:
            return _learn(store, batch, settings, listener, None if images_stored else undo)
        except Exception as error:
            # Not after Ctrl-C or a kill: then the images and the checkpoint are what the next call goes on from.
            if store.find_task(batch.task_id) is None:
                undo()
                if isinstance(error, StaleParent | BatchError):  # nobody can go on from these epochs
                    files.remove(_work(store, batch))
            if isinstance(error, OSError):
                raise StoreError(f"the data folder {root} could not be used: {error}") from error
            raise


def _learn(
    store: VersionStore, batch: LabelledBatch, settings: LearnerSettings, listener: Listener, undo: Undo | None
) -> Outcome:
    started = time.monotonic()
    set_up_torch(settings)
    backbone = open_backbone(store.root, settings.backbone, settings.backbone_weights, settings.adapted_blocks)
    images = ImageStore(store.root)
    if undo is not None:
        for image in batch.images:
            undo.put(image.sha256, batch.read(image.sha256))
    # Before the training, so that what cannot be exported is known at once and not after hours.
    graphs = _graphs(store, backbone)
    device = _device(settings)
    learner = Learner(backbone, Tokens(backbone, images.read, settings.seed, device), settings)
    parent = _parent(store, learner, images)
    fingerprint = _fingerprint(batch, parent, settings, device, backbone)
    checkpoint = Checkpoint(_work(store, batch), fingerprint)
    learned = learner.learn(parent.model, parent.samples, batch.keys, checkpoint, Progress(batch.task_id, listener))
    manifest = _manifest(batch, parent, settings, backbone, graphs, learned, time.monotonic() - started)
    tensors, samples, verdict = learned.model.tensors(), learned.samples.to_json(), learned.verdict
    if verdict.accepted:
        manifest = store.publish(manifest, tensors, samples)
        folder = store.folder(manifest.version)
        _sweep(store)
    else:
        folder = store.reject(manifest, tensors, samples, "; ".join(verdict.reasons))
    return Outcome("published" if verdict.accepted else "rejected", manifest, folder, verdict, learned.model)


def _sweep(store: VersionStore) -> None:
    """With a new parent nobody goes on from an older checkpoint, neither this task nor one given up before."""
    for folder in (store.root / "work").iterdir():
        if folder.is_dir():
            files.remove(folder)


# Before anything is written


def _work(store: VersionStore, batch: LabelledBatch) -> Path:
    return store.root / "work" / batch.task_id


def _already_learned(store: VersionStore, batch: LabelledBatch) -> Outcome | None:
    version = store.find_task(batch.task_id)
    if version is None:
        return None
    files.remove(_work(store, batch))  # of one who was killed right after publishing
    return Outcome("already learned", store.manifest(version), store.folder(version))


def _check_labels(store: VersionStore, batch: LabelledBatch) -> None:
    """Images learned under another label, and batches that bring nothing new, named by their files."""
    if store.current() is not None:
        loaded = store.load()
        if problems := unusable(loaded.manifest, batch.classes):
            raise BatchError(problems)
        origins = {image.sha256: image.origin for image in batch.images}
        unseen(batch.keys, Samples.from_json(loaded.samples), origins)


def _check_memory(store: VersionStore, batch: LabelledBatch, settings: LearnerSettings) -> None:
    """The learner would refuse it too, but only when the folder and the backbone are there."""
    current = store.current_manifest()
    check_size(current.classes if current else [], batch.classes, settings.memory)


def _check_space(store: VersionStore, image_bytes: int, settings: LearnerSettings) -> None:
    """Half a version on a full disk helps nobody: refuse while nothing has been written."""
    needed = image_bytes + WORKING_SPACE
    current = store.current()
    if current is not None:
        needed += 2 * sum(entry.size for entry in store.manifest(current).files.values())
    if not (store.root / "backbone.json").exists():
        weights = settings.backbone_weights
        needed += 2 * weights.stat().st_size if weights else NEW_FOLDER_SPACE
    folder = next(folder for folder in (store.root, *store.root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"not enough disk space for {store.root}: learning this batch may need {_megabytes(needed)}, "
            f"{_megabytes(free)} are free. Free some space, or choose a data folder on another disk."
        )


def _megabytes(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


# What goes into a version


def _parent(store: VersionStore, learner: Learner, images: ImageStore) -> _Parent:
    try:
        loaded = store.load(expect_backbone=learner.backbone.spec.sha256)
    except NothingLearned:
        return _Parent(None, None, learner.empty(), Samples())
    model, _ = read_model(loaded)
    manifest, samples = loaded.manifest, Samples.from_json(loaded.samples)
    left = samples.without_missing(images)
    lost = tuple(sorted(samples.keys - left.keys))
    if lost:
        log.warning("%d images of version %d were deleted: learning without them", len(lost), manifest.version)
    return _Parent(manifest.version, manifest.task_id, model, left, lost)


def _graphs(store: VersionStore, backbone: Backbone) -> dict[str, str]:
    """The backbone's ONNX graphs: a task is an input of theirs, so every version of a folder shares them."""
    current = store.current()
    if current is not None and (graphs := store.manifest(current).graphs):
        return graphs
    return {role: store.add_graph(data) for role, data in export(backbone).items()}


def _fingerprint(
    batch: LabelledBatch, parent: _Parent, settings: LearnerSettings, device: str, backbone: Backbone
) -> dict[str, Any]:
    """Everything that the weights depend on. The number of threads does: it sets the order of floating-point sums."""
    return {
        "task": batch.task_id,
        "parent": [parent.version, parent.task_id, parent.lost],
        "settings": settings.model_dump(mode="json", exclude=LOCAL | AFTERWARDS),
        "device": device,
        "backbone": backbone.spec.sha256,
    }


def _manifest(
    batch: LabelledBatch,
    parent: _Parent,
    settings: LearnerSettings,
    backbone: Backbone,
    graphs: dict[str, str],
    learned: Learned,
    seconds: float,
) -> Manifest:
    model, spec = learned.model, backbone.spec
    threshold = float(model.calibration.threshold[0])
    return Manifest(
        parent=parent.version,
        task_id=batch.task_id,
        tasks=[list(task.classes) for task in model.tasks],
        aliases=dict(model.aliases),
        backbone=spec.to_dict(),
        backbone_sha256=spec.sha256,
        preprocessing_sha256=spec.preprocessing.sha256,
        graphs=graphs,
        rule=model.rule.to_dict(),
        threshold=threshold if np.isfinite(threshold) else None,
        metrics={
            **learned.verdict.to_dict(),
            "capacity": model.shared.capacity,
            "seconds": round(seconds, 3),
            "images": len(batch.images),
            "images_per_class": batch.counts,
        },
        settings=settings.model_dump(mode="json", exclude=LOCAL),
        data_sha256=batch.sha256,
    )


# The machine


def _device(settings: LearnerSettings) -> str:
    available = torch.cuda.is_available()
    if settings.device == "cuda" and not available:
        raise BackboneError("OPENWORLD_DEVICE is cuda, but PyTorch finds no CUDA device: use auto or cpu")
    if not available or settings.device == "cpu":
        return "cpu"
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS refuses to be deterministic
    return "cuda"
