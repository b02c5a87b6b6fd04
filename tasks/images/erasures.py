"""The log of erased images: `<data>/erasures.jsonl`, append-only, with hashes only.

A line is written before the files are removed. It tells an erased image from a lost one, and a backup that is restored
does not bring erased images back.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError

from models.errors import StoreError
from models.files import append_durable, file_lock, fsync_folder

LOG = "erasures.jsonl"


class Erasure(BaseModel):
    """A line of the log."""

    model_config = ConfigDict(frozen=True)

    time: AwareDatetime
    by: str
    sha256s: tuple[str, ...]


def record_erasure(root: Path, sha256s: Collection[str], by: str) -> None:
    """Log that these images are about to be removed."""
    if not sha256s:
        return
    path = root / LOG
    line = Erasure(time=datetime.now(UTC), by=by, sha256s=tuple(sorted(sha256s)))
    try:
        with file_lock(path):
            append_durable(path, line.model_dump_json().encode())
            fsync_folder(root)
    except OSError as error:
        raise StoreError(f"{path} cannot be written ({error}): nothing is removed") from error


def erasures(root: Path) -> list[Erasure]:
    """Every erasure, oldest first; an incomplete line was cut off by a crash, before anything was removed."""
    try:
        return _parse((root / LOG).read_bytes())
    except FileNotFoundError:
        return []


def _parse(data: bytes) -> list[Erasure]:
    found = []
    for line in data.splitlines():
        with suppress(ValidationError):
            found.append(Erasure.model_validate_json(line))
    return found


def erased_at(root: Path) -> dict[str, float]:
    """Image -> when it was last erased, in seconds since the epoch."""
    return {sha256: erasure.time.timestamp() for erasure in erasures(root) for sha256 in erasure.sha256s}


class ErasureFollower:
    """Reads the erasures that are logged from now on. The log is how servers of one folder tell each other."""

    def __init__(self, root: Path) -> None:
        self._path = root / LOG
        self._offset = self._size()

    def new(self) -> set[str]:
        """The images that were erased since the last call."""
        if self._size() <= self._offset:
            return set()
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return {sha256 for erasure in _parse(complete) for sha256 in erasure.sha256s}

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except OSError:
            return 0


def erased_images(root: Path) -> set[str]:
    """The images that were ever erased; one that was submitted again since is among them."""
    return {sha256 for erasure in erasures(root) for sha256 in erasure.sha256s}
