"""The format marker of a data folder: written once, migrated forward, and refused when it is newer or damaged."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models.errors import FormatError, StoreError
from models.versions import data_format
from models.versions.data_format import FORMAT, check_format, open_data_folder
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest


def publish(root: Path) -> None:
    VersionStore(root).publish(make_manifest(), {"w": np.ones(3)}, {})


def test_a_new_folder_is_created_and_marked(tmp_path: Path) -> None:
    open_data_folder(tmp_path / "a" / "data")
    assert (tmp_path / "a" / "data" / "FORMAT").read_text() == f"{FORMAT}\n"
    open_data_folder(tmp_path / "a" / "data")
    check_format(tmp_path / "a" / "data")


def test_a_published_version_marks_its_folder(tmp_path: Path) -> None:
    publish(tmp_path)
    assert (tmp_path / "FORMAT").read_text() == f"{FORMAT}\n"


def test_reading_creates_nothing(tmp_path: Path) -> None:
    check_format(tmp_path / "nowhere")
    assert VersionStore(tmp_path / "nowhere").versions() == []
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_marker_has_format_1_and_is_marked_by_the_next_write(tmp_path: Path) -> None:
    publish(tmp_path)
    (tmp_path / "FORMAT").unlink()
    store = VersionStore(tmp_path)
    assert store.load().manifest.version == 1
    assert not (tmp_path / "FORMAT").exists()
    store.activate(1, "operator", "test")
    assert (tmp_path / "FORMAT").read_text() == "1\n"


def test_a_newer_format_is_refused_for_reading_and_writing(tmp_path: Path) -> None:
    store = VersionStore(tmp_path)
    (tmp_path / "FORMAT").write_text(f"{FORMAT + 1}\n")
    message = rf"has format {FORMAT + 1}, newer than {FORMAT}, .* upgrade openworld"
    for opened in (check_format, open_data_folder, VersionStore):
        with pytest.raises(FormatError, match=message):
            opened(tmp_path)
    with pytest.raises(FormatError, match=message):  # opened before another program migrated the folder
        store.publish(make_manifest(), {"w": np.ones(3)}, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["FORMAT"]


@pytest.mark.parametrize("content", [b"", b"one", b"1.0", b"-1", b"0", b"\xff\xfe", b"1 2", "٣".encode(), b"9" * 5000])
def test_a_damaged_marker_is_refused_and_kept(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "FORMAT").write_bytes(content)
    for opened in (check_format, open_data_folder):
        with pytest.raises(FormatError, match=r"FORMAT holds .*, not a format number: restore it from a backup"):
            opened(tmp_path)
    assert (tmp_path / "FORMAT").read_bytes() == content


def test_a_marker_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "FORMAT").mkdir()
    with pytest.raises(FormatError, match="FORMAT cannot be read: Is a directory"):
        check_format(tmp_path)


@pytest.fixture
def read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a version and without a marker, on a file system that takes no writes."""
    publish(tmp_path)
    (tmp_path / "FORMAT").unlink()

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(data_format, "write_durable", refuse)
    return tmp_path


def test_a_read_only_folder_without_marker_can_be_opened(read_only: Path) -> None:
    open_data_folder(read_only)
    assert VersionStore(read_only).load().manifest.version == 1


def test_an_older_folder_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, str]] = []

    def migration(n: int) -> None:
        marker = tmp_path / "FORMAT"
        monkeypatch.setitem(
            data_format.MIGRATIONS, n, lambda root: steps.append((n, marker.read_text() if marker.exists() else "none"))
        )

    publish(tmp_path)
    (tmp_path / "FORMAT").unlink()
    monkeypatch.setattr(data_format, "FORMAT", 3)
    migration(1)
    migration(2)
    with pytest.raises(FormatError, match=r"has format 1, this openworld reads format 3: .* to migrate it"):
        check_format(tmp_path)
    open_data_folder(tmp_path)
    assert steps == [(1, "none"), (2, "2\n")]
    assert (tmp_path / "FORMAT").read_text() == "3\n"
    open_data_folder(tmp_path)
    assert len(steps) == 2


def test_a_folder_that_must_be_migrated_and_cannot_be_written_is_refused(
    read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_format, "FORMAT", 2)
    monkeypatch.setitem(data_format.MIGRATIONS, 1, lambda root: None)
    with pytest.raises(StoreError, match=r"cannot be migrated from format 1 to 2: .*Read-only file system"):
        open_data_folder(read_only)
