import io
import os
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.batch import BatchLimits, LabelledBatch, open_batch
from tasks.batch.check import DEFAULT_LIMITS
from tasks.batch.zip_directory import count_members
from tasks.errors import BatchError
from tests.support.images import make_image, write_classes

IMAGES = [make_image(seed) for seed in range(8)]


def load_problems(path: Path, known: tuple[str, ...] = (), limits: BatchLimits = DEFAULT_LIMITS) -> list[str]:
    with pytest.raises(BatchError) as caught, open_batch(path, known, limits):
        pass
    return caught.value.problems


def load_batch(path: Path) -> LabelledBatch:
    """The batch of a closed source: its hashes and counts, but no images."""
    with open_batch(path) as batch:
        return batch


def zipped(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data, compress_type=method)
    return path


def good_members(top: str = "") -> dict[str, bytes]:
    return {f"{top}{label}/{at}.jpg": IMAGES[at + 2 * (label == "dog")] for label in ("cat", "dog") for at in (0, 1)}


# Folders


def test_one_error_lists_every_problem(tmp_path: Path) -> None:
    root = write_classes(
        tmp_path / "batch",
        {"cat": IMAGES[:3], "dog": [IMAGES[2], IMAGES[3]], "Dog": IMAGES[4:6], "cow": [b"moo"], "empty": []},
    )
    (root / "loose.jpg").write_bytes(IMAGES[6])
    (root / "cat" / "more").mkdir()
    text = "\n".join(load_problems(root))
    for part in (
        "'loose.jpg' lies outside",
        "'cat/more' is a folder inside a class",
        "'Dog' and 'dog' differ only",
        "'empty' is empty",
        "'cow' has no image",
        "'cow/0.jpg' cannot be read",
        "'cat/2.jpg' (class 'cat') and 'dog/0.jpg' (class 'dog')",
    ):
        assert part in text
    assert len(text.splitlines()) == 7


def test_a_folder_and_its_zips_are_the_same_task(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "batch", {"cat": IMAGES[:2], "dog": IMAGES[2:4]})
    batches: list[LabelledBatch] = [load_batch(root)]
    for at, top in enumerate(("", "batch/", "./batch/")):
        batches.append(load_batch(zipped(tmp_path / f"{at}.zip", good_members(top))))
    assert len({batch.task_id for batch in batches}) == 1
    assert {batch.classes for batch in batches} == {("cat", "dog")}


def test_files_that_desktops_create_are_ignored(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "batch", {"cat": IMAGES[:2], "__MACOSX": [b"fork"], ".cache": [b"x"]})
    for clutter in (".DS_Store", "cat/.DS_Store", "cat/Thumbs.db", "Thumbs.db", "cat/.hidden.jpg"):
        (root / clutter).write_bytes(b"clutter")
    assert load_batch(root).counts == {"cat": 2}
    members = {**good_members("top/"), "__MACOSX/top/cat/._0.jpg": b"fork", "top/.DS_Store": b"x"}
    assert load_batch(zipped(tmp_path / "mac.zip", members)).counts == {"cat": 2, "dog": 2}


def test_an_empty_class_folder_is_reported(tmp_path: Path) -> None:
    (problem,) = load_problems(write_classes(tmp_path, {"cat": IMAGES[:2], "dog": []}))
    assert problem.startswith("class 'dog' is empty")
    (problem,) = load_problems(zipped(tmp_path / "a.zip", {**good_members(), "cow/": b""}))
    assert problem.startswith("class 'cow' is empty")


def test_linked_classes_and_files_are_followed(tmp_path: Path) -> None:
    elsewhere = write_classes(tmp_path / "elsewhere", {"cat": IMAGES[:2], "more": IMAGES[2:3]})
    root = write_classes(tmp_path / "batch", {"dog": IMAGES[3:4]})
    (root / "cat").symlink_to(elsewhere / "cat")
    (root / "dog" / "linked.jpg").symlink_to(elsewhere / "more" / "0.jpg")
    assert load_batch(root).counts == {"cat": 2, "dog": 2}


def test_cyclic_and_broken_links_are_problems(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "batch", {"cat": IMAGES[:2]})
    (root / "round").symlink_to(root)
    (root / "self").symlink_to(root / "self")
    (root / "cat" / "gone.jpg").symlink_to(tmp_path / "gone.jpg")
    text = "\n".join(load_problems(root))
    assert "'round/cat' is a folder inside a class" in text
    assert "'self' cannot be opened" in text
    assert "'cat/gone.jpg' cannot be opened" in text


@pytest.mark.timeout(10)
def test_a_pipe_in_a_class_does_not_hang_the_reader(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "batch", {"cat": IMAGES[:2]})
    os.mkfifo(root / "cat" / "pipe.jpg")
    (problem,) = load_problems(root)
    assert "neither a file nor a folder" in problem


def test_a_folder_over_the_limits_is_refused_without_reading_it(tmp_path: Path) -> None:
    root = write_classes(tmp_path / "batch", {"cat": IMAGES[:2]})
    with (root / "cat" / "huge.jpg").open("wb") as file:
        file.truncate(1024**4)  # sparse: reading it would exhaust the memory
    (problem,) = load_problems(root)
    assert "bytes are more than the limit" in problem


@pytest.mark.parametrize("kind", ["missing", "text", "flat", "bare", "pipe"])
def test_a_path_that_is_not_a_batch_is_refused_with_the_expected_layout(tmp_path: Path, kind: str) -> None:
    path = tmp_path / kind
    if kind == "text":
        path.write_text("hello")
    elif kind in ("flat", "bare"):
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    if kind == "flat":
        (path / "1.jpg").write_bytes(IMAGES[0])
    assert "one sub-folder per class" in load_problems(path)[-1]


# Zips


@pytest.mark.parametrize(
    "name", ["/etc/cat/1.jpg", "../cat/1.jpg", "cat/../../1.jpg", "cat\\..\\..\\1.jpg", "C:/cat/1.jpg"]
)
def test_a_zip_member_outside_the_zip_is_refused(tmp_path: Path, name: str) -> None:
    (problem,) = load_problems(zipped(tmp_path / "a.zip", {**good_members(), name: IMAGES[6]}))
    assert "is a path out of the zip" in problem


def test_a_link_in_a_zip_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", good_members())
    with zipfile.ZipFile(path, "a") as archive:
        info = zipfile.ZipInfo("cat/link.jpg")
        info.external_attr = 0o120777 << 16
        archive.writestr(info, "/etc/passwd")
    (problem,) = load_problems(path)
    assert "'cat/link.jpg' is a link" in problem


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", good_members())
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(signature)
        struct.pack_into("<H", data, at + flags, 1)
    path.write_bytes(data)
    (problem,) = load_problems(path)
    assert "'cat/0.jpg' is encrypted: zip the folder again without a password" in problem


def test_a_zip_bomb_is_refused_by_its_table_of_contents(tmp_path: Path) -> None:
    one, whole = load_problems(zipped(tmp_path / "a.zip", {**good_members(), "cat/bomb.jpg": bytes(8 * 1024**2)}))
    assert "'cat/bomb.jpg' would grow from" in one
    assert "a.zip' would grow from" in whole


def test_many_small_members_can_be_a_zip_bomb(tmp_path: Path) -> None:
    members = {f"cat/{at}.jpg": bytes(900_000) for at in range(10)}
    (problem,) = load_problems(zipped(tmp_path / "a.zip", members))
    assert "a.zip' would grow from" in problem


def directory_of(members: int, stated: int | None = None, zip64: bool = False) -> bytes:
    """A zip of empty members, which consists of its directory only; the end record may state another number."""
    entry = struct.pack("<4s24xHHH12x", b"PK\1\2", 1, 0, 0) + b"a"
    directory, stated = entry * members, members if stated is None else stated
    end = struct.pack("<4s4xHHLLH", b"PK\5\6", *([min(stated, 0xFFFF)] * 2), len(directory), 0, 0)
    if zip64:
        record = struct.pack("<4sQ4xLLQQQQ", b"PK\6\6", 44, 0, 0, stated, stated, len(directory), 0)
        end = record + struct.pack("<4sLQL", b"PK\6\7", 0, len(directory), 1) + end
    return directory + end


@pytest.mark.parametrize(("stated", "zip64"), [(3_000_000, True), (1, False)])
def test_a_zip_of_millions_of_members_is_refused_before_objects_are_made(
    tmp_path: Path, stated: int, zip64: bool
) -> None:
    (tmp_path / "a.zip").write_bytes(directory_of(3_000_000, stated, zip64))
    used = tracemalloc_peak(lambda: load_problems(tmp_path / "a.zip"))
    assert used < 2 * 2**20


def tracemalloc_peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(("members", "zip64"), [(8, False), (8, True), (9, False), (9, True)])
def test_members_are_counted_by_the_directory(members: int, zip64: bool) -> None:
    assert count_members(io.BytesIO(directory_of(members, zip64=zip64)), 8) == members
    assert count_members(io.BytesIO(directory_of(members, stated=1, zip64=zip64)), 8) == members


def test_a_directory_of_long_names_is_refused(tmp_path: Path) -> None:
    members = {f"cat/{at}{'n' * 60_000}": b"" for at in range(20)}
    (problem,) = load_problems(zipped(tmp_path / "a.zip", members), (), BatchLimits(max_images=100))
    assert "its directory has" in problem


def test_a_zip_over_the_limits_is_refused_before_reading(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", good_members())
    (size,) = load_problems(path, limits=BatchLimits(max_bytes=1000))
    assert "bytes are more than the limit of 1000" in size
    (images,) = load_problems(path, limits=BatchLimits(max_images=3))
    assert "4 images are more than the limit of 3" in images
    (members,) = load_problems(
        zipped(tmp_path / "b.zip", {f"a/b/{at}": b"" for at in range(9)}), (), BatchLimits(max_images=2)
    )
    assert "more than 8 members" in members


def test_an_unusual_compression_is_refused(tmp_path: Path) -> None:
    problems = load_problems(zipped(tmp_path / "a.zip", good_members(), zipfile.ZIP_BZIP2))
    assert all("unusual method" in problem for problem in problems)


@pytest.mark.parametrize("keep", [0, 10, 500, -30])
def test_a_truncated_zip_is_called_broken(tmp_path: Path, keep: int) -> None:
    path = zipped(tmp_path / "a.zip", good_members())
    path.write_bytes(path.read_bytes()[:keep])
    (problem,) = load_problems(path)
    assert "broken zip" in problem


def test_a_damaged_member_is_reported_as_one_unreadable_file(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {**good_members(), "cat/9.jpg": IMAGES[6]}, zipfile.ZIP_STORED)
    data = bytearray(path.read_bytes())
    at = data.find(IMAGES[6]) + 300
    data[at] ^= 0xFF
    path.write_bytes(data)
    (problem,) = load_problems(path)
    assert "'cat/9.jpg' cannot be read (damaged inside the zip" in problem


def test_a_utf8_name_without_the_flag_is_decoded(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {f"café/{at}.jpg": IMAGES[at] for at in (0, 1)})
    data = path.read_bytes()
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        raw, start = bytearray(data), 0
        while (start := data.find(signature, start)) >= 0:
            struct.pack_into("<H", raw, start + flags, 0)
            start += 4
        data = bytes(raw)
    path.write_bytes(data)
    assert load_batch(path).classes == ("café",)


@given(st.binary(max_size=300), st.integers(0, 2000))
def test_a_zip_damaged_anywhere_is_accepted_or_a_batch_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int
) -> None:
    path = zipped(tmp_path_factory.mktemp("noise") / "a.zip", good_members())
    data = path.read_bytes()
    at = min(at * 3, len(data))
    path.write_bytes(data[:at] + noise + data[at + len(noise) :])
    with suppress(BatchError):
        load_batch(path)
