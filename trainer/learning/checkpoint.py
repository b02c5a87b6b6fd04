"""Checkpoints: the last finished epoch of each phase, from which an interrupted training resumes.

They are in the storage of the data folder, so on an object store a trainer on another machine resumes from them.
"""

import json
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from models import files
from models.files import sha256_bytes
from models.storage import Storage

FOLDER = "work/"

Tensors = dict[str, NDArray[Any]]


class Checkpoint:
    """One value per phase of a task, replaced after each epoch; without a storage, nothing is saved.

    `fingerprint` holds everything that the result depends on (batch, parent, settings, backbone): a checkpoint with
    another fingerprint is deleted, not resumed. Each value is bound to its fingerprint: what a stopped trainer saves
    after another one has changed the fingerprint counts as damaged. Two trainers with one fingerprint compute the same
    bytes, so it does no harm that either may replace what the other has saved.
    """

    def __init__(self, storage: Storage | None, task_id: str = "", fingerprint: dict[str, Any] | None = None) -> None:
        self._storage, self._place = storage, f"{FOLDER}{task_id}/"
        self._fingerprint = sha256_bytes(json.dumps(fingerprint, sort_keys=True, default=str).encode()).encode()
        if storage is not None and self._get("fingerprint") != self._fingerprint:
            remove_checkpoint(storage, task_id)
            storage.put(f"{self._place}fingerprint", self._fingerprint)

    def save(self, phase: str, epoch: int, tensors: Tensors) -> None:
        """Save the state of a phase after `epoch` finished epochs."""
        if self._storage is not None:
            data = epoch.to_bytes(8, "little") + save_tensors(tensors)
            self._storage.put(f"{self._place}{phase}", self._digest(data) + data)

    def load(self, phase: str) -> tuple[int, Tensors]:
        """The finished epochs of a phase and its state; (0, {}) if nothing is saved or the value is damaged."""
        stored = self._get(phase)
        digest, data = stored[:64], stored[64:]
        if not data or digest != self._digest(data):
            return 0, {}
        return int.from_bytes(data[:8], "little"), load_tensors(data[8:])

    def _digest(self, data: bytes) -> bytes:
        return sha256_bytes(self._fingerprint + data).encode()

    def _get(self, name: str) -> bytes:
        try:
            return self._storage.get(f"{self._place}{name}") if self._storage is not None else b""
        except FileNotFoundError:
            return b""


def remove_checkpoint(storage: Storage, task_id: str) -> None:
    if storage.shared:
        storage.delete([found.key for found in storage.list(f"{FOLDER}{task_id}/")])
    else:
        files.remove(storage.root / FOLDER / task_id)


def checkpointed_tasks(storage: Storage) -> set[str]:
    """The tasks that have a checkpoint."""
    if storage.shared:
        return {found.key.split("/")[1] for found in storage.list(FOLDER)}
    return {path.name for path in (storage.root / FOLDER).glob("[!.]*") if path.is_dir()}
