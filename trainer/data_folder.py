"""The data folder during a training: one training at a time, and a failed one leaves only lock files behind."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from models import files
from models.errors import KeepError, StoreError
from models.storage import DataFolder, Storage, storage_of
from models.versions.backbone_spec import RECORD
from models.versions.data_format import open_data_folder
from models.versions.keep import Keep, check_keep, open_keep, recorded_keep
from models.versions.store import VersionStore
from tasks.images import ImageStore, erase_cached
from trainer.learning.settings import REPLAYING_METHODS, LearnerSettings
from trainer.parent import METHOD_SETTING, with_method

# What a training creates in a data folder. Other programs keep files of their own there.
TRAINING_FILES = (
    *("backbone.json", "backbone.safetensors", "images", "graphs", "work/*"),
    *("versions", "rejected", "tasks", "heads", "samples", "promotions", "FORMAT", "KEEP", "features", "cache"),
)


LOCK_POLL_SECONDS = 0.5


def check_folder_settings(folder: DataFolder, settings: LearnerSettings) -> None:
    """KeepError if the settings do not fit what the folder keeps. Nothing is written."""
    check_method(settings.keep or recorded_keep(folder), folder, settings)
    check_keep(folder, settings.keep)


def keep_of(folder: DataFolder, settings: LearnerSettings) -> Keep:
    """What the folder keeps of taught images; KeepError if the settings ask for something else.

    A new folder records it, unless its method cannot learn with it.
    """
    check_folder_settings(folder, settings)
    return open_keep(folder, settings.keep)


def check_method(keep: Keep, folder: DataFolder, settings: LearnerSettings) -> None:
    """KeepError if the method of the folder needs more of earlier tasks than is kept."""
    if keep != "statistics":
        return
    method = with_method(settings, VersionStore(folder).current_manifest()).method
    if method in REPLAYING_METHODS:
        raise KeepError(
            f"the method {method} replays features of earlier images and updates earlier heads with them, and a data "
            f"folder that keeps statistics has none: set {METHOD_SETTING} to hat-csi or sup-csi in a new data folder, "
            "or keep features"
        )


@dataclass(frozen=True)
class Turn:
    """How a worker, which holds the lease of a task, waits until no other training runs in the data folder."""

    queue: str  # the prefix of its queue
    patience: float  # seconds to wait for a training of the same queue
    on_wait: Callable[[], None]  # called while it waits; may raise to give up


@contextmanager
def training_lock(folder: DataFolder, turn: Turn | None = None) -> Iterator[None]:
    """Allow one training per data folder and machine: only one of them could publish.

    Without `turn`, StoreError if another training runs. With it, wait until that training ends. Only a training of the
    same queue is not waited for without limit: the queue leases one task at a time, so that worker has lost its lease,
    and it may hang. Continuing without the lock is then safe: two attempts at one task write the same checkpoints, and
    one of them publishes.
    """
    storage = storage_of(folder)
    root = storage.root
    with ExitStack() as stack:
        try:
            open_data_folder(storage)
            files.make_folder(root / "work")
            _lock(stack, root / "work" / ".lock", turn)
        except TimeoutError as error:
            raise StoreError(f"another training is running in {root}: wait until it ends, then try again") from error
        except OSError as error:
            raise StoreError(
                f"the data folder {root} cannot be written ({error}): check the path and its rights"
            ) from error
        yield


def _lock(stack: ExitStack, path: Path, turn: Turn | None) -> None:
    """Hold the lock until the stack is closed, with the name of the queue in its file."""
    same_queue_since: float | None = None
    while True:
        try:
            descriptor = stack.enter_context(files.file_lock(path, LOCK_POLL_SECONDS if turn else 0.0))
        except TimeoutError:
            if turn is None:
                raise
            turn.on_wait()
            now = time.monotonic()
            same_queue_since = (same_queue_since or now) if path.read_text() == turn.queue else None
            if same_queue_since is not None and now - same_queue_since >= turn.patience:
                return
        else:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, turn.queue.encode() if turn else b"", 0)
            return


def check_disk_space(root: Path, needed: int) -> None:
    folder = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StoreError(
            f"not enough disk space for {root}: learning this batch may need {needed / 2**20:,.0f} MiB, "
            f"{free / 2**20:,.0f} MiB are free. Free some space, or choose a data folder on another disk."
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Rollback:
    """Removes what a failed training added to the data folder.

    In a folder with a backbone only images are removed: the other files are small, or the next attempt resumes from
    them. From a shared storage nothing is removed, because another machine may use it by now.
    """

    def __init__(self, storage: Storage) -> None:
        self._root, self._images, self._shared = storage.root, ImageStore(storage), storage.shared
        self._added: list[str] = []
        self._unstored: list[str] = []
        self._in_use = storage.find(RECORD) is not None
        self._before = self._files()

    def _files(self) -> set[Path]:
        """Without lock files: a process that waits for a removed one would not exclude the next process."""
        return {path for name in TRAINING_FILES for path in self._root.glob(name) if path.name != ".lock"}

    def put(self, sha256: str, read: Callable[[str], bytes]) -> None:
        """Store an image, to be removed by `run` if the store did not hold it before. One that it holds is not read."""
        try:
            data = self._images.read(sha256)
        except StoreError:  # missing or damaged
            data = read(sha256)
            if sha256 not in self._images:
                self._added.append(sha256)
        self._images.put(data)

    def read_unstored(self, sha256s: Iterable[str]) -> None:
        """Images that are read from the batch and not stored: `run` removes their cached features."""
        self._unstored += sha256s

    def run(self) -> None:
        """Remove as much as possible: an error here must not hide the error that made the training fail."""
        if self._shared:
            return
        for sha256 in self._added:
            with suppress(StoreError):
                self._images.remove(sha256)
        with suppress(StoreError):
            erase_cached(self._root, [*self._added, *self._unstored])
        for path in set() if self._in_use else self._files() - self._before:
            with suppress(OSError):
                files.remove(path)
