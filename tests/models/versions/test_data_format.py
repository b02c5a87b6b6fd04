"""The format marker of a data folder: written once, migrated forward, and refused when it is newer or damaged."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from models.errors import FormatError, StoreError
from models.files import write_durable
from models.storage import LocalFiles
from models.versions import data_format
from models.versions.data_format import FORMAT, check_format, open_data_folder
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.version_stores import tree


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


def test_a_folder_with_versions_and_without_marker_has_format_1(tmp_path: Path) -> None:
    publish(tmp_path)
    (tmp_path / "FORMAT").unlink()
    with pytest.raises(FormatError, match=rf"has format 1, .* reads format {FORMAT}: start `openworld serve`"):
        VersionStore(tmp_path)


def test_a_folder_that_another_process_marks_at_this_moment_is_not_taken_for_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = LocalFiles.get

    def get_then_publish(self: LocalFiles, key: str) -> bytes:
        try:
            return get(self, key)
        except FileNotFoundError:
            monkeypatch.undo()
            publish(tmp_path)
            raise

    monkeypatch.setattr(LocalFiles, "get", get_then_publish)
    check_format(tmp_path)
    assert VersionStore(tmp_path).current() == 1


def test_a_folder_without_versions_and_without_marker_is_marked_by_the_next_write(tmp_path: Path) -> None:
    (tmp_path / "inbox").mkdir()
    publish(tmp_path)
    assert (tmp_path / "FORMAT").read_text() == f"{FORMAT}\n"
    assert VersionStore(tmp_path).load().manifest.version == 1


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
    """A folder without a marker, on a file system that takes no writes."""

    def refuse(path: Path, data: bytes) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(data_format, "write_durable", refuse)
    return tmp_path


def test_a_read_only_folder_without_marker_can_be_opened(read_only: Path) -> None:
    open_data_folder(read_only)
    assert VersionStore(read_only).versions() == []


def test_an_older_folder_is_migrated_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, str]] = []

    def migration(n: int) -> None:
        marker = tmp_path / "FORMAT"
        monkeypatch.setitem(
            data_format.MIGRATIONS, n, lambda root: steps.append((n, marker.read_text() if marker.exists() else "none"))
        )

    publish(tmp_path)
    (tmp_path / "FORMAT").unlink()
    monkeypatch.setattr(data_format, "FORMAT", 4)
    for n in (1, 2, 3):
        migration(n)
    with pytest.raises(FormatError, match=r"has format 1, this openworld reads format 4: .* to migrate it"):
        check_format(tmp_path)
    open_data_folder(tmp_path)
    assert steps == [(1, "none"), (2, "2\n"), (3, "3\n")]
    assert (tmp_path / "FORMAT").read_text() == "4\n"
    open_data_folder(tmp_path)
    assert len(steps) == 3


def test_a_folder_that_must_be_migrated_and_cannot_be_written_is_refused(
    read_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (read_only / "CURRENT").write_text("1\n")
    with pytest.raises(StoreError, match=rf"cannot be migrated from format 1 to {FORMAT}: .*Read-only file system"):
        open_data_folder(read_only)


@pytest.mark.parametrize("killed", [True, False])
def test_a_migration_keeps_a_backup_of_what_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    publish(tmp_path)
    for name in ("images/ab/abcd", "inbox/inbox.sqlite3"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    before = tree(tmp_path)

    def migrate(root: Path) -> None:
        write_durable(root / "CURRENT", b"9\n")
        (root / "versions" / "000001.json").unlink()
        if killed and not (root / "again").exists():
            (root / "again").touch()
            raise KeyboardInterrupt

    monkeypatch.setattr(data_format, "FORMAT", FORMAT + 1)
    monkeypatch.setitem(data_format.MIGRATIONS, FORMAT, migrate)
    if killed:
        with pytest.raises(KeyboardInterrupt):
            open_data_folder(tmp_path)
        (tmp_path / "versions" / "000001.json").write_text("?")  # the second attempt must not replace the backup
    open_data_folder(tmp_path)
    assert (tmp_path / "FORMAT").read_text() == f"{FORMAT + 1}\n"
    kept = {name: content for name, content in before.items() if not name.startswith(("images", "inbox"))}
    assert tree(tmp_path / f"format-{FORMAT}") == kept


# From format 1 to 2


@pytest.fixture
def format_1(tmp_path: Path) -> Path:
    """A data folder of the first release: versions, a backbone, and what other programs keep there."""
    (tmp_path / "FORMAT").write_text("1\n")
    for name in (
        *("graphs/a.onnx", "rejected/t/manifest.json", "images/ab/abcd", "inbox/inbox.sqlite3", "backbone.json"),
        *("versions/000001/manifest.json", "promotions.jsonl", "CURRENT"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


MOVED = {"CURRENT", "promotions.jsonl", "versions", "rejected", "graphs", "backbone.json"}


def test_versions_of_format_1_are_moved_away_and_learning_starts_again(
    format_1: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manifest = (format_1 / "versions" / "000001" / "manifest.json").read_bytes()
    open_data_folder(format_1)
    assert {path.name for path in (format_1 / "format-1").iterdir()} == MOVED
    assert (format_1 / "format-1" / "versions" / "000001" / "manifest.json").read_bytes() == manifest
    assert {path.name for path in format_1.iterdir()} - {".lock"} == {"FORMAT", "format-1", "images", "inbox"}
    assert (format_1 / "images" / "ab" / "abcd").read_text() == "images/ab/abcd"
    assert f"kept in {format_1 / 'format-1'}" in caplog.text
    assert "must be taught again" in caplog.text
    assert VersionStore(format_1).current() is None
    publish(format_1)
    assert VersionStore(format_1).load().manifest.version == 1


@pytest.mark.parametrize("killed_after", range(len(MOVED) + 1))
@pytest.mark.parametrize("marked", [True, False])
def test_a_migration_that_was_killed_is_completed(
    format_1: Path, monkeypatch: pytest.MonkeyPatch, killed_after: int, marked: bool
) -> None:
    if not marked:
        (format_1 / "FORMAT").unlink()
    moves, rename = 0, Path.rename

    def killed(path: Path, target: Path) -> Path:
        nonlocal moves
        if moves == killed_after:
            raise KeyboardInterrupt
        moves += 1
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        patch.setattr(data_format, "_mark", lambda root, number: killed(root, root))
        with pytest.raises(KeyboardInterrupt):
            open_data_folder(format_1)
    open_data_folder(format_1)
    assert {path.name for path in (format_1 / "format-1").iterdir()} == MOVED
    assert (format_1 / "FORMAT").read_text() == f"{FORMAT}\n"
