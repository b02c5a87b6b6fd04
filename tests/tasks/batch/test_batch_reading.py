"""A batch keeps no image bytes: it reads each image again from its source, and verifies it."""

import gc
import tracemalloc
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from models.errors import StoreError
from models.files import sha256_bytes
from tasks.batch import BatchCheck, open_batch
from tasks.images import ImageStore
from tests.support.images import make_image, write_classes

IMAGES = [make_image(seed) for seed in range(4)]


@pytest.fixture(params=["folder", "zip"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder = write_classes(tmp_path / "batch", {"cat": IMAGES[:2], "dog": IMAGES[2:]})
    return folder if request.param == "folder" else zip_of(folder)


def zip_of(folder: Path) -> Path:
    path = folder.with_suffix(".zip")
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.glob("*/*")):
            archive.write(file, str(file.relative_to(folder)))
    return path


def test_every_image_is_read_again_by_its_hash(source: Path) -> None:
    with open_batch(source) as batch:
        assert {image.sha256: batch.read(image.sha256) for image in batch.images} == {
            sha256_bytes(data): data for data in IMAGES
        }


def test_a_file_that_changes_after_the_check_is_refused(tmp_path: Path) -> None:
    folder = write_classes(tmp_path, {"cat": IMAGES[:2]})
    with open_batch(folder) as batch:
        (folder / "cat" / "1.jpg").write_bytes(IMAGES[2])
        assert batch.read(sha256_bytes(IMAGES[0])) == IMAGES[0]
        with pytest.raises(StoreError, match=r"'cat/1.jpg' changed while the batch was read: .*submit it again"):
            batch.read(sha256_bytes(IMAGES[1]))


def test_a_zip_that_changes_after_the_check_is_refused(tmp_path: Path) -> None:
    large = [make_image(seed, (256, 256)) for seed in range(2)]  # larger than the buffer of the open file
    path = zip_of(write_classes(tmp_path / "batch", {"cat": large}))
    with open_batch(path) as batch:
        data = bytearray(path.read_bytes())
        data[data.find(large[1]) + 300] ^= 0xFF
        with path.open("r+b") as file:
            file.write(data)
        with pytest.raises(StoreError, match=r"'cat/1.jpg' cannot be read a second time \(damaged inside the zip"):
            batch.read(sha256_bytes(large[1]))


def test_a_file_that_is_removed_after_the_check_is_refused(tmp_path: Path) -> None:
    folder = write_classes(tmp_path, {"cat": IMAGES[:2]})
    with open_batch(folder) as batch:
        (folder / "cat" / "0.jpg").unlink()
        with pytest.raises(StoreError, match=r"'cat/0.jpg' cannot be read a second time \(No such file"):
            batch.read(sha256_bytes(IMAGES[0]))


def test_an_image_that_leaves_its_store_after_the_check_is_refused() -> None:
    stored = {"a": IMAGES[0], "b": IMAGES[1]}

    def read(id: str) -> bytes:
        if id not in stored:
            raise StoreError("the image is gone")
        return stored[id]

    check = BatchCheck()
    for id in ("a", "b"):
        check.add("cat", id, lambda id=id: read(id))  # type: ignore[misc]
    batch = check.finish()
    del stored["b"]
    assert batch.read(sha256_bytes(IMAGES[0])) == IMAGES[0]
    with pytest.raises(StoreError, match=r"'b' cannot be read a second time"):
        batch.read(sha256_bytes(IMAGES[1]))


@contextmanager
def peak_bytes() -> Iterator[list[int]]:
    """Record the peak of Python's memory, above what is allocated on entry."""
    peak: list[int] = []
    # With the large heap of a test run, the collector would free the cycles of closed images late: leave that heap out.
    gc.collect()
    gc.freeze()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()
        gc.unfreeze()


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_memory_does_not_grow_with_the_batch(kind: str, tmp_path: Path) -> None:
    """Check and store 300 images of 110 kB: the peak stays below four of them, and per image below 4 kB of records."""
    count, size = 300, (192, 192)
    folder = tmp_path / "batch"
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
    for seed in range(count):
        (folder / ("cat", "dog")[seed % 2] / f"{seed}.png").write_bytes(make_image(seed, size, "PNG"))
    source = folder if kind == "folder" else zip_of(folder)
    one = make_image(0, size, "PNG")
    images = ImageStore(tmp_path / "data")
    with peak_bytes() as peak, open_batch(source) as batch:
        for image in batch.images:
            images.put(batch.read(image.sha256))
    assert batch.total_bytes > 250 * len(one)
    assert peak[0] < 4 * len(one) + 4096 * count
    assert peak[0] < batch.total_bytes / 10
