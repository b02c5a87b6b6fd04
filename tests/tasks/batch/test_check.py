"""The check of a batch as a whole: its images, its classes and its limits."""

import random
import unicodedata

import pytest

from tasks.batch import BatchLimits
from tests.support.batches import batch_problems, check_batch, items, one_class
from tests.support.images import make_image

IMAGES = [make_image(seed) for seed in range(8)]


# Valid batches


def test_a_valid_batch_has_classes_counts_and_bytes() -> None:
    batch = check_batch(items(dog=IMAGES[:2], cat=IMAGES[2:5]))
    assert batch.classes == ("cat", "dog")
    assert batch.counts == {"cat": 3, "dog": 2}
    assert batch.total_bytes == sum(map(len, IMAGES[:5]))
    assert batch.duplicates == 0


def test_one_new_class_is_a_batch() -> None:
    assert check_batch(items(cat=IMAGES[:2])).classes == ("cat",)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_every_image_format_is_accepted(format: str) -> None:
    assert check_batch(items(cat=[make_image(1, format=format), make_image(2, format=format)])).counts == {"cat": 2}


def test_a_copy_within_a_class_is_dropped_and_counted() -> None:
    batch = check_batch(items(cat=[IMAGES[0], IMAGES[1], IMAGES[0]]))
    assert (batch.counts, batch.duplicates) == ({"cat": 2}, 1)


def test_the_task_id_does_not_depend_on_order_origin_or_copies() -> None:
    given = items(cat=IMAGES[:3], dog=IMAGES[3:6])
    shuffled = [(label, f"elsewhere/{at}", data) for at, (label, _, data) in enumerate([*given, given[0]])]
    random.Random(0).shuffle(shuffled)
    first, second = check_batch(given), check_batch(shuffled)
    assert first.task_id == second.task_id
    assert [image.sha256 for image in first.images] == [image.sha256 for image in second.images]
    assert len(first.task_id) == 16
    assert set(first.task_id) <= set("0123456789abcdef")


def test_the_task_id_changes_with_a_label_or_an_image() -> None:
    batches = [items(cat=IMAGES[:2]), items(dog=IMAGES[:2]), items(cat=IMAGES[1:3])]
    assert len({check_batch(batch).task_id for batch in batches}) == 3


def test_a_decomposed_name_means_the_known_class() -> None:
    decomposed = unicodedata.normalize("NFD", "café")
    assert check_batch([(decomposed, "1.jpg", IMAGES[0])], known_classes=["café"]).classes == ("café",)


def test_spaces_around_a_name_are_dropped() -> None:
    assert check_batch(one_class(" cat ")).classes == ("cat",)


# Too few, unreadable or conflicting images


def test_an_empty_batch_is_refused() -> None:
    assert batch_problems([]) == ["the batch is empty: give at least one class with its images"]


def test_a_new_class_with_one_image_is_accepted_with_a_warning() -> None:
    batch = check_batch(items(cat=IMAGES[:1], dog=IMAGES[1:3]))
    assert batch.counts == {"cat": 1, "dog": 2}
    assert batch.warnings([]) == ["class 'cat' has 1 image: more images make its answers better"]
    assert batch.warnings(["cat"]) == []


def test_classes_that_lose_images_are_named_with_the_number_of_images() -> None:
    batch = check_batch(items(cat=IMAGES[:3], dog=IMAGES[3:5]))
    cat, dog = batch.keys["cat"], batch.keys["dog"]
    learned = {cat[0]: "lynx", cat[1]: "lynx", cat[2]: "cat", dog[0]: "wolf"}
    assert batch.warnings([], learned) == [
        "class 'lynx' loses 2 images to class 'cat': they were learned as 'lynx' before",
        "class 'wolf' loses 1 image to class 'dog': it was learned as 'wolf' before",
    ]


def test_copies_do_not_count_as_images() -> None:
    (warning,) = check_batch(items(cat=[IMAGES[0], IMAGES[0]])).warnings([])
    assert "'cat' has 1 image" in warning


def test_an_unreadable_file_is_named_with_the_reason() -> None:
    truncated = make_image(9, size=(64, 64))[:400]
    notes, broken = batch_problems([*one_class("cat"), ("cat", "notes.txt", b"hello"), ("cat", "cut.jpg", truncated)])
    assert "'notes.txt' cannot be read (not a JPEG, PNG or WebP)" in notes
    assert "'cut.jpg' cannot be read (" in broken


def test_an_empty_file_is_called_empty() -> None:
    (problem,) = batch_problems([*one_class("cat"), ("cat", "nothing.jpg", b"")])
    assert "'nothing.jpg' cannot be read (the file is empty)" in problem


def test_a_class_whose_files_are_all_unreadable_is_not_called_empty() -> None:
    problems = batch_problems([*one_class("cat"), ("dog", "notes.txt", b"hello")])
    assert any("'dog' has no image that can be read" in problem for problem in problems)
    assert not any("is empty" in problem for problem in problems)


def test_a_long_list_of_unreadable_files_is_shortened() -> None:
    problems = batch_problems([*one_class("cat"), *(("cat", f"{at}.txt", f"text {at}".encode()) for at in range(33))])
    assert len(problems) == 11
    assert problems[-1].startswith("and 23 more files that cannot be read")


def test_the_same_image_in_two_classes_names_both_files() -> None:
    (problem,) = batch_problems(items(cat=IMAGES[:3], dog=IMAGES[2:5]))
    assert "'cat/2.jpg' (class 'cat') and 'dog/0.jpg' (class 'dog')" in problem


# Limits


def test_each_exceeded_limit_is_reported_with_both_numbers() -> None:
    given = items(cat=IMAGES[:2], dog=IMAGES[2:4], cow=IMAGES[4:6])
    limits = BatchLimits(max_classes=2, max_images=5, max_bytes=3000)
    classes, images, size = batch_problems(given, limits=limits)
    assert "3 classes are more than the limit of 2" in classes
    assert "6 images are more than the limit of 5" in images
    assert f"{sum(map(len, IMAGES[:6]))} bytes are more than the limit of 3000" in size


def test_a_batch_exactly_at_its_limits_is_accepted() -> None:
    given = items(cat=IMAGES[:2], dog=IMAGES[2:4])
    check_batch(given, limits=BatchLimits(max_classes=2, max_images=4, max_bytes=sum(map(len, IMAGES[:4]))))
