"""Folders that take seconds to make: made once per test run, and shared by its worker processes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from models.files import file_lock, temporary_beside

VARIABLE = "TEST_RUN_FOLDER"


def add_run_folder(config: pytest.Config) -> None:
    """Create the folder of this run, and remove it at the end. The workers of pytest-xdist inherit its name."""
    if hasattr(config, "workerinput"):
        return
    folder = tempfile.mkdtemp(prefix="test-run-")
    os.environ[VARIABLE] = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    config.add_cleanup(lambda: stop_recorded(Path(folder)))  # runs before the one above


def record_process(pid: int) -> None:
    """A process that the other processes of the run use: it is ended with the run, by its id."""
    folder = Path(os.environ[VARIABLE]) / "processes"
    folder.mkdir(exist_ok=True)
    (folder / str(pid)).touch()


def stop_recorded(folder: Path) -> None:
    for path in (folder / "processes").glob("*"):
        with suppress(ProcessLookupError):
            os.kill(int(path.name), signal.SIGKILL)


def made_once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` of this run. The first process that needs it makes it, the others wait. Do not change it."""
    folder = Path(os.environ[VARIABLE]) / name
    with file_lock(folder.with_name(f"{name}.lock")):
        if not folder.exists():
            unfinished = temporary_beside(folder)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder
