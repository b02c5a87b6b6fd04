"""Files and folders that are whole or absent after a power cut: write beside, fsync, rename, fsync the parent."""

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

TEMPORARY = ".tmp"


def sha256_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sha256_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_beside(path: Path) -> Path:
    """A fresh hidden name in the same folder, so that the rename stays inside one file system."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY}")


def fsync_folder(folder: Path) -> None:
    """Make the folder's entries durable: without it a rename may be forgotten by a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder and say so; there is nothing better to do on them.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder, with its parents, durably; nothing happens when it is there."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    fsync_folder(folder.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and fsync it; the caller still owes the fsync of its folder."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, data: bytes) -> None:
    """Replace `path` by `data` as one step: a reader, or a crash, sees the old file or the new one, never a mixture."""
    temporary = temporary_beside(path)
    try:
        write_synced(temporary, data)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def write_folder(folder: Path, files: Mapping[str, bytes], on_step: Callable[[str], None] = lambda step: None) -> None:
    """Put a folder in place with all of its files, or not at all; one already there is replaced."""
    temporary = temporary_beside(folder)
    try:
        temporary.mkdir()
        on_step("started")
        for name, data in files.items():
            write_synced(temporary / name, data)
        fsync_folder(temporary)
        on_step("written")
        if folder.exists():
            discard(folder)
        temporary.rename(folder)
    except BaseException:
        remove(temporary)
        raise
    try:
        fsync_folder(folder.parent)
        on_step("renamed")
    except BaseException:
        discard(folder)
        raise


def discard(folder: Path) -> None:
    """Remove a folder; killed half-way, it is a temporary name that remains and not a half of the folder."""
    temporary = temporary_beside(folder)
    folder.rename(temporary)
    remove(temporary)


def remove(path: Path) -> None:
    """Remove a file or a folder as far as possible: a temporary that stays is swept up later."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def append_durable(path: Path, line: bytes) -> None:
    """Append one line and fsync it. A line torn by a crash is closed off first, so that it spoils nothing but itself.

    One writer at a time: hold a lock.
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
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock that dies with its process. The file stays: removing a lock file lets two holders in."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # Closing alone would leave the lock with any child forked meanwhile, which shares the descriptor.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _write_all(descriptor: int, data: bytes) -> None:
    # os.write may take only a part: at most 2 GiB a call on Linux, less when the disk fills.
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
