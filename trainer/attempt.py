"""One attempt at learning in a data folder: alone while it lasts, and without a trace when it fails."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from models import files
from models.errors import StoreError
from tasks.images.store import ImageStore

# Everything that learning makes in a data folder. Other programs keep files of their own there.
OURS = (
    *("backbone.json", "backbone.safetensors", "images", "graphs", "work"),
    *("versions", "rejected", "promotions.jsonl", ".lock"),
)


@contextmanager
def alone(root: Path, patience: float | None = None) -> Iterator[None]:
    """One training a data folder: two would share checkpoints, and one of them would lose its hours at the end.

    With `patience` a worker that holds the task's lease waits so many seconds and then goes on all the same: whoever
    has the lock may be a process that hangs. Two attempts at one task write the same checkpoints, and one publishes.
    """
    try:
        files.make_folder(root / "work")
        descriptor = os.open(root / "work" / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(
            f"the data folder {root} cannot be written ({error}): check the path and its rights"
        ) from error
    try:
        if not _locked(descriptor, patience or 0.0) and patience is None:
            raise StoreError(f"another training is running in {root}: wait until it ends, then try again")
        yield
    finally:
        os.close(descriptor)


def _locked(descriptor: int, patience: float) -> bool:
    end = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(0.1)


class Undo:
    """Takes away what a failed attempt put into the data folder; what was there before it stays.

    In a folder that is in use only images go: the rest is small, or is what the next attempt goes on from.
    """

    def __init__(self, root: Path) -> None:
        root = root.absolute()
        self._images = ImageStore(root)
        self._put: list[str] = []
        self._folders = [folder for folder in (root, *root.parents) if not folder.exists()]  # innermost first
        in_use = (root / "backbone.json").exists()
        self._ours = [] if in_use else [root / name for name in OURS if not (root / name).exists()]

    def put(self, sha256: str, data: bytes) -> None:
        """Store an image, to be removed again if it was not there."""
        if sha256 not in self._images:
            self._put.append(sha256)
        self._images.put(data)

    def __call__(self) -> None:
        # As far as it goes: a second failure must not hide the first one, which somebody has to read.
        for sha256 in self._put:
            with suppress(StoreError):
                self._images.remove(sha256)
        for path in self._ours:
            with suppress(OSError):
                files.remove(path)
        for folder in self._folders:
            with suppress(OSError):  # not empty: somebody else put something there meanwhile
                folder.rmdir()
