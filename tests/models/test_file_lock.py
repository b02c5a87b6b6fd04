"""`file_lock`: one holder at a time, bounded waiting, and a lock that child processes can keep."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from models import files
from models.files import file_lock


def test_a_held_lock_refuses_a_single_try(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with (
        file_lock(path),
        pytest.raises(TimeoutError, match="locked by another process"),
        file_lock(path, timeout=0),
    ):
        pass
    with file_lock(path, timeout=0):
        pass


def test_waiting_ends_when_the_holder_releases_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with file_lock(path):
            held.set()
            release.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    threading.Timer(0.2, release.set).start()
    with file_lock(path, timeout=30):
        assert release.is_set()
    thread.join()


def test_waiting_ends_after_the_timeout(tmp_path: Path) -> None:
    with file_lock(tmp_path / "lock"):
        started = time.monotonic()
        with pytest.raises(TimeoutError), file_lock(tmp_path / "lock", timeout=0.2):
            pass
        assert time.monotonic() - started >= 0.2


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    program = f"import os, pathlib, models.files as f\nwith f.file_lock(pathlib.Path({str(path)!r})):\n    os._exit(0)"
    subprocess.run([sys.executable, "-c", program], check=True)
    with file_lock(path, timeout=0):
        pass


def test_a_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path) as descriptor:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    with file_lock(path, timeout=0):
        pass
    child.communicate(b"\n")


def test_children_keep_a_lock_that_is_shared_with_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path, shared_with_children=True) as descriptor:
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[descriptor])
    with pytest.raises(TimeoutError), file_lock(path, timeout=0):
        pass
    child.communicate(b"\n")
    with file_lock(path, timeout=30):
        pass


def test_the_descriptor_can_hold_the_holders_pid(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with file_lock(path) as descriptor:
        os.pwrite(descriptor, b"123", 0)
        assert path.read_text() == "123"


def test_only_temporary_files_of_ended_writers_are_abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer holds a lock on its temporary file, whatever the clock says."""
    monkeypatch.setattr(files, "TEMPORARY_SECONDS", 0.0)
    (tmp_path / "ab").mkdir()
    left = files.temporary_beside(tmp_path / "ab" / "killed")
    left.write_bytes(b"half")
    seen: list[Path] = []
    fsync = os.fsync

    def look(descriptor: int) -> None:
        seen.extend(files.abandoned(tmp_path))
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", look)
        files.write_durable(tmp_path / "ab" / "written", b"whole")
    assert set(seen) == {left}
    assert (tmp_path / "ab" / "written").read_bytes() == b"whole"
