"""Local copies of objects that never change: verified, bounded, and of no use to an attacker or a broken disk."""

from pathlib import Path

import pytest

from models.files import sha256_bytes
from models.storage.object_cache import ObjectCache, content_hash


def key_of(data: bytes) -> str:
    return f"tasks/{sha256_bytes(data)}.safetensors"


@pytest.mark.parametrize(
    ("key", "named"),
    [
        (f"images/ab/{'ab' * 32}", "ab" * 32),
        (f"tasks/{'01' * 32}.safetensors", "01" * 32),
        (f"samples/{'01' * 32}.json.gz", "01" * 32),
        (f"graphs/{'01' * 32}.onnx", "01" * 32),
        ("versions/000007.json", None),
        ("CURRENT", None),
        (f"rejected/{'ab' * 31}.json", None),
    ],
)
def test_the_hash_of_an_object_that_never_changes_is_in_its_name(key: str, named: str | None) -> None:
    assert content_hash(key) == named


def test_a_copy_is_used_only_while_its_bytes_are_right(tmp_path: Path) -> None:
    cache, data = ObjectCache(tmp_path, 10_000), b"tensors"
    key, sha256 = key_of(data), sha256_bytes(data)
    assert cache.get(key, sha256) is None
    cache.put(key, data)
    assert cache.get(key, sha256) == data
    cache.path(key).write_bytes(b"changed")
    assert cache.get(key, sha256) is None
    assert not cache.path(key).exists()


def test_a_damaged_file_is_fetched_again(tmp_path: Path) -> None:
    cache, data, fetched = ObjectCache(tmp_path, 10_000), b"a graph", 0

    def fetch() -> bytes:
        nonlocal fetched
        fetched += 1
        return data

    for _ in range(2):
        assert cache.file(key_of(data), sha256_bytes(data), fetch).read_bytes() == data
    assert fetched == 1
    cache.path(key_of(data)).write_bytes(b"changed")
    assert cache.file(key_of(data), sha256_bytes(data), fetch).read_bytes() == data
    assert fetched == 2


def test_the_copies_that_were_used_the_longest_ago_make_room(tmp_path: Path) -> None:
    cache = ObjectCache(tmp_path, 1000)
    values = [bytes([n]) * 90 for n in range(30)]
    for number, value in enumerate(values):
        cache.put(key_of(value), value)
        kept = cache.get(key_of(values[0]), sha256_bytes(values[0]))  # used all the time
        assert kept == values[0], number
    sizes = [path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()]
    assert 0 < sum(sizes) <= 1000
    assert cache.get(key_of(values[1]), sha256_bytes(values[1])) is None
    assert cache.get(key_of(values[-1]), sha256_bytes(values[-1])) == values[-1]
    again = ObjectCache(tmp_path, 1000)
    again.put(key_of(b"x" * 99), b"x" * 99)
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) <= 1000


def test_a_disk_that_cannot_be_written_only_makes_reading_slower(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "objects").write_text("a file in the place of the folder")
    cache = ObjectCache(tmp_path / "objects", 10_000)
    cache.put(key_of(b"1"), b"1")
    assert "no local copy" in caplog.text
    assert cache.get(key_of(b"1"), sha256_bytes(b"1")) is None
