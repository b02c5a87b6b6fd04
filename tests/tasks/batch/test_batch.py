import random
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.batch.check import DEFAULT_LIMITS, BatchLimits
from tasks.errors import BatchError
from tests.support.batches import check_batch
from tests.support.images import make_image

Items = list[tuple[str, str, bytes]]

IMAGES = [make_image(seed) for seed in range(8)]


def items(**classes: list[bytes]) -> Items:
    return [(name, f"{name}/{at}.jpg", data) for name, images in classes.items() for at, data in enumerate(images)]


def named(name: str) -> Items:
    return [(name, "a.jpg", IMAGES[0]), (name, "b.jpg", IMAGES[1])]


def problems_of(given: Items, known: tuple[str, ...] = (), limits: BatchLimits = DEFAULT_LIMITS) -> list[str]:
    with pytest.raises(BatchError) as caught:
        check_batch(given, known, limits)
    return caught.value.problems


# A good batch.


def test_a_good_batch_knows_its_classes_counts_and_bytes() -> None:
    batch = check_batch(items(dog=IMAGES[:2], cat=IMAGES[2:5]))
    assert batch.classes == ("cat", "dog")
    assert batch.counts == {"cat": 3, "dog": 2}
    assert batch.total_bytes == sum(map(len, IMAGES[:5]))
    assert batch.duplicates == 0


def test_one_new_class_alone_is_a_batch() -> None:
    assert check_batch(items(cat=IMAGES[:2])).classes == ("cat",)


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_every_format_of_the_service_can_be_taught(format: str) -> None:
    assert check_batch(items(cat=[make_image(1, format=format), make_image(2, format=format)])).counts == {"cat": 2}


def test_a_copy_within_a_class_is_counted_once_and_is_no_problem() -> None:
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


def test_a_decomposed_name_of_macos_is_the_known_class() -> None:
    decomposed = unicodedata.normalize("NFD", "café")
    assert check_batch([(decomposed, "1.jpg", IMAGES[0])], known_classes=["café"]).classes == ("café",)


def test_spaces_around_a_name_are_dropped() -> None:
    assert check_batch(named(" cat ")).classes == ("cat",)


# Too few, unreadable, in two classes.


def test_nothing_at_all_is_a_problem() -> None:
    assert problems_of([]) == ["the batch is empty: give at least one class with its images"]


def test_a_class_with_one_image_is_a_problem_and_says_how_many_are_needed() -> None:
    (problem,) = problems_of(items(cat=IMAGES[:1], dog=IMAGES[1:3]))
    assert "'cat' has 1 image only" in problem
    assert "until it has 2" in problem


def test_copies_do_not_make_one_image_two() -> None:
    (problem,) = problems_of(items(cat=[IMAGES[0], IMAGES[0]]))
    assert "'cat' has 1 image only" in problem


def test_one_image_is_enough_for_a_class_that_is_known() -> None:
    assert check_batch(items(cat=IMAGES[:1]), known_classes=["cat"]).counts == {"cat": 1}


def test_an_unreadable_file_is_named_with_the_readers_reason() -> None:
    truncated = make_image(9, size=(64, 64))[:400]
    notes, broken = problems_of([*named("cat"), ("cat", "notes.txt", b"hello"), ("cat", "cut.jpg", truncated)])
    assert "'notes.txt' cannot be read (not a JPEG, PNG or WebP)" in notes
    assert "'cut.jpg' cannot be read (" in broken


def test_an_empty_file_is_called_empty() -> None:
    (problem,) = problems_of([*named("cat"), ("cat", "nothing.jpg", b"")])
    assert "'nothing.jpg' cannot be read (the file is empty)" in problem


def test_a_class_whose_files_are_all_unreadable_is_not_called_empty() -> None:
    problems = problems_of([*named("cat"), ("dog", "notes.txt", b"hello")])
    assert any("'dog' has no image that can be read" in problem for problem in problems)
    assert not any("is empty" in problem for problem in problems)


def test_many_unreadable_files_are_folded() -> None:
    problems = problems_of([*named("cat"), *(("cat", f"{at}.txt", f"text {at}".encode()) for at in range(33))])
    assert len(problems) == 11
    assert problems[-1].startswith("and 23 more files that cannot be read")


def test_the_same_image_in_two_classes_names_both_files() -> None:
    (problem,) = problems_of(items(cat=IMAGES[:3], dog=IMAGES[2:5]))
    assert "'cat/2.jpg' (class 'cat') and 'dog/0.jpg' (class 'dog')" in problem


# Names.


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("..", "path"),
        ("../cat", "path"),
        ("animals/cat", "path"),
        ("animals\\cat", "path"),
        ("/etc/cat", "path"),
        ("C:cat", "path"),
        (".cat", "leading dot"),
        ("ca\0t", "control"),
        ("cat\n", "control"),
        ("cat\u202e", "control"),
        ("cat\udc80", "not valid text"),
        ("ood", "reserved"),
        ("OOD ", "reserved"),
        ("", "blank"),
        (" \t", "blank"),
        ("\u200b", "blank"),
        ("c" * 65, "65 characters, more than 64"),
    ],
)
def test_a_bad_name_is_a_problem_on_one_line(name: str, what: str) -> None:
    (problem,) = problems_of(named(name))
    assert what in problem
    assert problem.isprintable()


@pytest.mark.parametrize("name", ["cat", "Katze", "grüne Katze", "猫", "cat 2", "a..b", "x" * 64, "👩‍🔬"])
def test_a_plain_name_in_any_language_is_accepted(name: str) -> None:
    assert check_batch(named(name)).classes == (name,)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Cat", "cat "),
        ("cat", "CAT"),
        ("big cat", "big  cat"),
        ("café", "cafe\u0301"),
        ("cat", "c\u200bat"),
        ("ﬁsh", "fish"),
    ],
)
def test_names_that_people_confuse_are_a_problem(one: str, other: str) -> None:
    given = [(one, "1", IMAGES[0]), (one, "2", IMAGES[1]), (other, "3", IMAGES[2]), (other, "4", IMAGES[3])]
    (problem,) = problems_of(given)
    assert "differ only in case, spaces or Unicode form" in problem
    assert all(repr(name) in problem or ascii(name) in problem for name in (one, other))


def test_two_unicode_forms_of_a_name_are_told_apart_in_the_message() -> None:
    (problem,) = problems_of([("café", "1", IMAGES[0]), ("café", "2", IMAGES[1]), ("cafe\u0301", "3", IMAGES[2])])
    assert r"'caf\xe9' and 'cafe\u0301'" in problem


def test_a_name_that_only_looks_like_a_known_class_is_a_problem() -> None:
    (problem,) = problems_of(named("Cat"), known=("cat",))
    assert "'Cat' differs from the known class 'cat'" in problem


@given(st.lists(st.text(max_size=70), min_size=1, max_size=4, unique=True), st.lists(st.text(max_size=5), max_size=2))
def test_any_text_as_a_name_is_accepted_or_a_batch_error(names: list[str], known: list[str]) -> None:
    given = [(name, f"{at}", IMAGES[2 * i + at]) for i, name in enumerate(names) for at in (0, 1)]
    problems: list[str] | None = None
    try:
        batch = check_batch(given, known)
    except BatchError as error:
        problems = error.problems
    if problems is not None:
        assert problems
        assert all(len(problem.splitlines()) == 1 for problem in problems)
    else:
        assert len(batch.classes) == len(names)
        assert all(name == unicodedata.normalize("NFC", name).strip() for name in batch.classes)
        assert not any(set(name) & set("/\\\0\n") or name.startswith(".") for name in batch.classes)
        assert check_batch(given, batch.classes).task_id == batch.task_id  # submitted again, it is the same batch


# Limits.


def test_each_limit_is_a_problem_with_both_numbers() -> None:
    given = items(cat=IMAGES[:2], dog=IMAGES[2:4], cow=IMAGES[4:6])
    limits = BatchLimits(max_classes=2, max_images=5, max_bytes=3000)
    classes, images, size = problems_of(given, limits=limits)
    assert "3 classes are more than the limit of 2" in classes
    assert "6 images are more than the limit of 5" in images
    assert f"{sum(map(len, IMAGES[:6]))} bytes are more than the limit of 3000" in size


def test_a_batch_exactly_at_its_limits_is_accepted() -> None:
    given = items(cat=IMAGES[:2], dog=IMAGES[2:4])
    check_batch(given, limits=BatchLimits(max_classes=2, max_images=4, max_bytes=sum(map(len, IMAGES[:4]))))
