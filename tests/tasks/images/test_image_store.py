import hashlib
from pathlib import Path

import pytest

from models.errors import StoreError
from tasks.images import ImageStore


def test_read_returns_the_bytes_that_were_put(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha = store.put(b"image")
    assert sha == hashlib.sha256(b"image").hexdigest()
    assert store.read(sha) == b"image"
    assert (tmp_path / "images" / sha[:2] / sha).read_bytes() == b"image"


def test_a_second_put_leaves_the_file_untouched(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha = store.put(b"image")
    path = tmp_path / "images" / sha[:2] / sha
    before = path.stat().st_ino
    assert store.put(b"image") == sha
    assert path.stat().st_ino == before
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == [path]


def test_a_store_opened_again_has_the_same_images(tmp_path: Path) -> None:
    sha = ImageStore(tmp_path).put(b"image")
    assert sha in ImageStore(tmp_path)
    assert ImageStore(tmp_path).read(sha) == b"image"


def test_the_keys_are_those_of_the_images_and_of_nothing_else(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    assert store.keys() == set()
    kept, gone = store.put(b"kept"), store.put(b"gone")
    (tmp_path / "images" / kept[:2] / f".{kept}.temporary").write_bytes(b"")
    (tmp_path / "images" / "note").write_bytes(b"")
    assert store.keys() == {kept, gone}
    store.remove(gone)
    assert store.keys() == {kept}


def test_a_missing_image_is_a_store_error_that_names_it(tmp_path: Path) -> None:
    sha = hashlib.sha256(b"never put").hexdigest()
    with pytest.raises(StoreError, match=f"{sha} is not in the store"):
        ImageStore(tmp_path).read(sha)


def test_a_changed_image_is_never_returned(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha = store.put(b"image")
    (tmp_path / "images" / sha[:2] / sha).write_bytes(b"imag")
    with pytest.raises(StoreError, match="corrupt"):
        store.read(sha)


def test_a_second_put_repairs_a_damaged_image(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha = store.put(b"image")
    (tmp_path / "images" / sha[:2] / sha).write_bytes(b"")
    store.put(b"image")
    assert store.read(sha) == b"image"


def test_a_removed_image_is_gone_and_removing_it_again_is_no_error(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha = store.put(b"image")
    store.remove(sha)
    store.remove(sha)
    assert sha not in store
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_removal_leaves_other_images(tmp_path: Path) -> None:
    store = ImageStore(tmp_path)
    sha = store.put(b"image")
    beside = tmp_path / "images" / sha[:2] / ("0" * 64)
    beside.write_bytes(b"another")
    store.remove(sha)
    assert beside.exists()


@pytest.mark.parametrize("key", ["", "..", "../" * 3 + "etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"])
def test_a_key_that_is_not_a_hash_reaches_no_file(tmp_path: Path, key: str) -> None:
    store = ImageStore(tmp_path)
    assert key not in store
    with pytest.raises(StoreError, match="not the sha256"):
        store.read(key)
    with pytest.raises(StoreError, match="not the sha256"):
        store.remove(key)


def test_a_folder_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match="cannot be stored"):
        ImageStore(tmp_path).put(b"image")
