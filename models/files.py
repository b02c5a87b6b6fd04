"""Durable files and folders, and file locks.

A durable write is complete or absent after a power cut: write a temporary file, fsync it, rename it, fsync the folder.
"""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TEMPORARY = ".tmp"
TEMPORARY_SECONDS = 1.0  # a younger temporary file is never taken for abandoned
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_FORBIDDEN = (errno.EACCES, errno.EPERM)
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS)  # a file system without hard links
LOCK_POLL_SECONDS = 0.05


def is_full(error: BaseException) -> bool:
    """Whether the error, or one that caused it, says that the disk is full, over its quota or read-only."""
    return any(
        (isinstance(cause, OSError) and cause.errno in _FULL)
        or (isinstance(cause, sqlite3.Error) and _primary_code(cause) in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY))
        for cause in _causes(error)
    )


def is_unusable(error: BaseException) -> bool:
    """Whether it is full, or this user lacks the right to use the file."""
    return is_full(error) or any(
        (isinstance(cause, OSError) and cause.errno in _FORBIDDEN)
        or (isinstance(cause, sqlite3.Error) and _primary_code(cause) == sqlite3.SQLITE_PERM)
        for cause in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # extended codes contain it


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_beside(path: Path) -> Path:
    """A new hidden name in the same folder, so that a rename stays inside one file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def fsync_folder(folder: Path) -> None:
    """Make the entries of a folder durable; without it a power cut may undo a rename."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents durably, unless they exist."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def write_durable(path: Path, data: bytes) -> None:
    """Replace the content of `path` atomically: a reader, also after a crash, gets the old or the new content."""
    with _complete_temporary(path, data) as temporary:
        temporary.replace(path)
    fsync_folder(path.parent)


def create_durable(path: Path, data: bytes) -> bool:
    """Create `path` with all of its content, atomically; False if it exists, also if another process was faster."""
    if path.exists():
        return False
    with _complete_temporary(path, data) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            # Without hard links, two processes that create the file at the same time both succeed.
            if error.errno not in NO_LINKS:
                raise
            temporary.replace(path)
    try:
        fsync_folder(path.parent)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return True


@contextmanager
def _complete_temporary(path: Path, data: bytes) -> Iterator[Path]:
    """A synced file beside `path`, removed at the end unless it was renamed.

    It is locked until then: `abandoned` recognises those of killed processes.
    """
    temporary = temporary_beside(path)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _write_all(descriptor, data)
        os.fsync(descriptor)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
        os.close(descriptor)


def abandoned(folder: Path) -> Iterator[Path]:
    """The temporary files below `folder` that a killed process has left; those that a process writes are locked."""
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            if name.startswith(".") and name.endswith(TEMPORARY) and _is_abandoned(path):
                yield path


def remove_abandoned(folder: Path) -> None:
    for path in abandoned(folder):
        with suppress(OSError):
            path.unlink()


def _is_abandoned(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False  # renamed or removed since, or of another user
    try:
        # A writer opens the file and then locks it: in between, only the age tells that the file is in use.
        if time.time() - os.fstat(descriptor).st_mtime < TEMPORARY_SECONDS:
            return False
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(descriptor).st_nlink > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def discard(folder: Path) -> None:
    """Remove a folder; a kill leaves a folder with a temporary name, never an incomplete one with its own name."""
    temporary = temporary_beside(folder)
    folder.rename(temporary)
    remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as possible; writers remove remaining temporary names later."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def append_durable(path: Path, line: bytes) -> None:
    """Append one line and fsync it. The caller must hold a lock: one writer at a time.

    An incomplete last line, left by a crash, is ended first, so that only this line is lost.
    """
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        try:
            _write_all(descriptor, (b"\n" if torn else b"") + line + b"\n")
            os.fsync(descriptor)
        except BaseException:
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if created:
        fsync_folder(path.parent)


@contextmanager
def file_lock(path: Path, timeout: float | None = None, *, shared_with_children: bool = False) -> Iterator[int]:
    """Hold an exclusive lock (flock) on `path`, created if missing, and yield its descriptor.

    Waits without limit by default, at most `timeout` seconds otherwise (0 tries once), then raises TimeoutError. The
    kernel releases the lock when the process ends. With `shared_with_children`, child processes that inherit the
    descriptor (`pass_fds`) keep the lock after this block, until the last of them ends. The file is never removed:
    that would let two processes lock two different files of the same name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        _acquire(descriptor, path, timeout)
        try:
            yield descriptor
        finally:
            if not shared_with_children:
                # A forked child has a copy of the descriptor: closing ours alone would not release the lock.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, timeout: float | None) -> None:
    if timeout is None:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        return
    deadline = time.monotonic() + timeout
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(errno.ETIMEDOUT, "locked by another process", str(path)) from None
            time.sleep(min(LOCK_POLL_SECONDS, remaining))


def _write_all(descriptor: int, data: bytes) -> None:
    # os.write may write only a part: at most 2 GiB per call on Linux, less when the disk fills up.
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
