"""The id of a data folder: made once, the same for every process."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from models.errors import StoreError
from models.versions.folder_id import MARKER, folder_id


def test_the_id_is_made_once_and_differs_between_folders(tmp_path: Path) -> None:
    first, other = folder_id(tmp_path / "robot"), folder_id(tmp_path / "other")
    assert first == folder_id(tmp_path / "robot") != other
    assert (tmp_path / "robot" / "FORMAT").exists()


def test_processes_that_start_together_get_the_same_id(tmp_path: Path) -> None:
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(folder_id(tmp_path / "robot"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_damaged_id_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(b"\xff{}")
    with pytest.raises(StoreError, match="restore it from a backup"):
        folder_id(tmp_path)


def test_a_folder_without_an_id_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StoreError, match="cannot be written"):
        folder_id(tmp_path / "file")
