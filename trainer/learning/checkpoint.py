"""Checkpoints: the last finished epoch of each phase, from which an interrupted training resumes."""

import json
import shutil
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

from models.files import sha256_bytes, write_durable

Tensors = dict[str, NDArray[Any]]


class Checkpoint:
    """A folder with one file per phase, replaced after each epoch; without a folder, nothing is saved.

    `fingerprint` holds everything that the result depends on (batch, parent, settings, backbone): a checkpoint with
    another fingerprint is deleted, not resumed.
    """

    def __init__(self, folder: Path | None, fingerprint: dict[str, Any] | None = None) -> None:
        self._folder = folder
        if folder is None:
            return
        name = sha256_bytes(json.dumps(fingerprint, sort_keys=True, default=str).encode())
        mark = folder / "fingerprint"
        if folder.exists() and (not mark.exists() or mark.read_text() != name):
            shutil.rmtree(folder)
        if not folder.exists():
            folder.mkdir(parents=True)
            write_durable(mark, name.encode())

    def save(self, phase: str, epoch: int, tensors: Tensors) -> None:
        """Save the state of a phase after `epoch` finished epochs."""
        if self._folder is not None:
            data = epoch.to_bytes(8, "little") + save_tensors(tensors)
            write_durable(self._folder / phase, sha256_bytes(data).encode() + data)

    def load(self, phase: str) -> tuple[int, Tensors]:
        """The finished epochs of a phase and its state; (0, {}) if nothing is saved or the file is damaged."""
        if self._folder is None or not (self._folder / phase).exists():
            return 0, {}
        stored = (self._folder / phase).read_bytes()
        digest, data = stored[:64], stored[64:]
        if digest != sha256_bytes(data).encode():
            return 0, {}
        return int.from_bytes(data[:8], "little"), load_tensors(data[8:])
