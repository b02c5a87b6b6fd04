"""The feature cache: a record is right or absent, whatever happens to its file, its image or the disk."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from models.files import sha256_bytes
from models.storage import LocalFiles
from models.versions.store import VersionStore
from openworld.check import check_folder
from service.erasure import clean_up
from tasks.images import FeatureCache, ImageStore, Retention, cache_files, erase_cached, feature_cache, record_erasure

BACKBONE = "b" * 64
NAMES = [sha256_bytes(bytes([n])) for n in range(6)]
SIZE = 200  # columns of a record
FILE = SIZE * 4 + 56  # bytes of a file with one record


class Stored(set[str]):
    """The names of the stored images."""


def cache(root: Path, limit: int = 10**6, images: Stored | None = None) -> FeatureCache:
    return FeatureCache(root, BACKBONE, Stored(NAMES) if images is None else images, limit)


def record(n: int = 0, rows: int = 1) -> feature_cache.Record:
    return np.random.default_rng(n).normal(size=(rows, SIZE // rows)).astype(np.float32)


def path_of(root: Path, name: str) -> Path:
    return root / "cache" / BACKBONE[:16] / name[:2] / name


def test_records_are_read_by_another_process_object_as_they_were_put(tmp_path: Path) -> None:
    writer = cache(tmp_path)
    writer.put("tokens", {NAMES[0]: record(0, rows=5), NAMES[1]: record(1)})
    writer.put("task a", {NAMES[0]: record(2)})
    reader = cache(tmp_path)
    for each in (writer, reader):
        assert np.array_equal(each.get(NAMES[0], "tokens"), record(0, rows=5))
        assert np.array_equal(each.get(NAMES[0], "task a"), record(2))
        assert np.array_equal(each.get(NAMES[1], "tokens"), record(1))
        assert each.get(NAMES[1], "task a") is None
        assert each.get(NAMES[2], "tokens") is None
    assert FeatureCache(tmp_path, "c" * 64, Stored(NAMES), 10**6).get(NAMES[0], "tokens") is None


def test_small_files_keep_no_file_descriptor_and_large_ones_are_mapped(tmp_path: Path) -> None:
    """A trainer reads thousands of images, and a process may have 1024 descriptors."""
    large = np.zeros((1, feature_cache.READ_BYTES), np.float32)
    cache(tmp_path).put("tokens", {**{name: record(n) for n, name in enumerate(NAMES[:5])}, NAMES[5]: large})
    reader, before = cache(tmp_path), len(os.listdir("/proc/self/fd"))
    found = [reader.get(name, "tokens") for name in NAMES[:5]]
    assert len(os.listdir("/proc/self/fd")) == before
    assert all(own is not None and own.flags.writeable for own in found)
    assert np.array_equal(reader.get(NAMES[5], "tokens"), large)
    assert len(os.listdir("/proc/self/fd")) == before + 1


def test_images_that_are_no_longer_in_use_are_forgotten(tmp_path: Path) -> None:
    own = cache(tmp_path)
    own.put("tokens", {name: record(n) for n, name in enumerate(NAMES[:3])})
    own.keep_only(NAMES[1:3])
    path_of(tmp_path, NAMES[0]).unlink()
    path_of(tmp_path, NAMES[1]).unlink()
    assert own.get(NAMES[0], "tokens") is None
    assert np.array_equal(own.get(NAMES[1], "tokens"), record(1))


@pytest.mark.parametrize("cut", [1, 30, FILE - 1, FILE, FILE + 20, 2 * FILE - 1])
def test_a_torn_file_gives_its_whole_records_and_is_written_again(tmp_path: Path, cut: int) -> None:
    """A kill, or a power cut, in the middle of a write."""
    first = cache(tmp_path)
    first.put("a", {NAMES[0]: record(0)})
    first.put("b", {NAMES[0]: record(1)})
    path = path_of(tmp_path, NAMES[0])
    path.write_bytes(path.read_bytes()[:cut])
    again = cache(tmp_path)
    assert (again.get(NAMES[0], "a") is not None) == (cut >= FILE)
    assert again.get(NAMES[0], "b") is None
    again.put("b", {NAMES[0]: record(1)})
    assert np.array_equal(again.get(NAMES[0], "b"), record(1))
    assert np.array_equal(cache(tmp_path).get(NAMES[0], "b"), record(1))


@pytest.mark.parametrize("place", [0, 5, 20, 45, 50, 60, FILE - 1])
def test_a_changed_byte_is_noticed(tmp_path: Path, place: int) -> None:
    cache(tmp_path).put("a", {NAMES[0]: record(0)})
    path = path_of(tmp_path, NAMES[0])
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    damaged = cache(tmp_path)
    assert damaged.get(NAMES[0], "a") is None
    damaged.put("a", {NAMES[0]: record(0)})
    assert np.array_equal(cache(tmp_path).get(NAMES[0], "a"), record(0))


def test_images_that_were_used_the_longest_ago_make_room(tmp_path: Path) -> None:
    for n in range(4):
        cache(tmp_path).put("a", {NAMES[n]: record(n)})
        os.utime(path_of(tmp_path, NAMES[n]), (n, n))
    full = cache(tmp_path, limit=4 * FILE)
    assert full.get(NAMES[0], "a") is not None  # used again
    full.put("a", {NAMES[4]: record(4)})
    assert {file.sha256 for file in cache_files(tmp_path)} == {NAMES[0], NAMES[3], NAMES[4]}


def test_the_limit_holds_and_images_in_use_stay(tmp_path: Path) -> None:
    small = cache(tmp_path, limit=2 * FILE)
    for n in range(4):
        small.put("a", {NAMES[n]: record(n)})
    assert {file.sha256 for file in cache_files(tmp_path)} == {NAMES[0], NAMES[1]}
    cache(tmp_path, limit=FILE)  # lowered
    assert sum(file.bytes for file in cache_files(tmp_path)) <= FILE


def test_a_limit_of_zero_removes_the_cache_and_writes_nothing(tmp_path: Path) -> None:
    cache(tmp_path).put("a", {NAMES[0]: record(0)})
    off = cache(tmp_path, limit=0)
    off.put("a", {NAMES[1]: record(1)})
    assert list(cache_files(tmp_path)) == []
    assert off.get(NAMES[0], "a") is None


@pytest.mark.parametrize("kind", ["no space", "a part", "almost full"])
def test_a_full_disk_ends_the_writing_with_a_warning(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = cache(tmp_path)
    first.put("a", {NAMES[0]: record(0)})
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        if kind == "a part":
            return write(descriptor, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "no space left on device")

    if kind == "almost full":
        monkeypatch.setattr(feature_cache, "FREE_BYTES", 2**62)
    else:
        monkeypatch.setattr(os, "write", full)
    with caplog.at_level(logging.WARNING):
        first.put("a", {NAMES[1]: record(1)})
        first.put("a", {NAMES[2]: record(2)})
    assert len(caplog.records) == 1
    assert "no longer written" in caplog.text
    monkeypatch.undo()
    again = cache(tmp_path)
    assert np.array_equal(again.get(NAMES[0], "a"), record(0))
    assert again.get(NAMES[1], "a") is None
    assert again.get(NAMES[2], "a") is None
    first.keep_only(NAMES)  # before another task
    first.put("a", {NAMES[1]: record(1)})
    assert np.array_equal(cache(tmp_path).get(NAMES[1], "a"), record(1))


def test_an_image_that_is_erased_before_or_while_its_entry_is_written_keeps_none(tmp_path: Path) -> None:
    images = Stored(NAMES[:2])
    writer = cache(tmp_path, images=images)
    assert writer.get(NAMES[0], "a") is None
    images.remove(NAMES[0])
    writer.put("a", {NAMES[0]: record(0)})
    assert not path_of(tmp_path, NAMES[0]).exists()

    class ErasedWhileWritten(Stored):
        asked = 0

        def __contains__(self, name: object) -> bool:
            self.asked += 1
            return self.asked == 1

    cache(tmp_path, images=ErasedWhileWritten()).put("a", {NAMES[1]: record(1)})
    assert not path_of(tmp_path, NAMES[1]).exists()


def test_erasing_an_image_erases_its_entries_of_all_backbones(tmp_path: Path) -> None:
    images = ImageStore(tmp_path)
    erased, kept = images.put(b"erased"), images.put(b"kept")
    for backbone in ("b" * 64, "c" * 64):
        FeatureCache(tmp_path, backbone, images, 10**6).put("a", {erased: record(0), kept: record(1)})
    assert [image.sha256 for image in Retention(VersionStore(tmp_path)).remove(erased, "operator")] == [erased]
    assert {file.sha256 for file in cache_files(tmp_path)} == {kept}
    assert erase_cached(tmp_path, [kept]) == 2
    assert list(cache_files(tmp_path)) == []


def test_an_interrupted_erasure_is_reported_and_completed(tmp_path: Path) -> None:
    images = ImageStore(tmp_path)
    sha256 = images.put(b"erased")
    cache(tmp_path, images=Stored([sha256])).put("a", {sha256: record(0)})
    record_erasure(tmp_path, [sha256], "operator")
    images.remove(sha256)  # killed here
    assert [finding.code for finding in check_folder(tmp_path, None).problems] == ["orphan_features"]
    clean_up(LocalFiles(tmp_path))
    assert list(cache_files(tmp_path)) == []
    assert check_folder(tmp_path, None).problems == []


WRITER = """
import sys
from pathlib import Path
import numpy as np
from tests.tasks.images.test_feature_cache import NAMES, cache, record
writer = cache(Path(sys.argv[1]), limit=10**9)
print("started", flush=True)
for number in range(10**6):
    writer.put(f"kind {number}", {name: record(number) for name in NAMES})
"""


def test_a_cache_whose_writer_was_killed_holds_only_right_records(tmp_path: Path) -> None:
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        while not any(file.bytes > 20 * FILE for file in cache_files(tmp_path)):
            pass
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        after = cache(tmp_path)
        found = 0
        for name in NAMES:
            for number in range(40):
                stored = after.get(name, f"kind {number}")
                found += stored is not None
                assert stored is None or np.array_equal(stored, record(number))
        assert found >= 20
