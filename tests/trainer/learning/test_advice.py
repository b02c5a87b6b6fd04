"""What would help: confused classes, labels that look wrong, classes with few images."""

from collections.abc import Sequence

import numpy as np
import pytest

pytest.importorskip("torch")

from models.inference.evidence import FrozenScores
from models.inference.rules import Rule
from tests.support.tiny_model import TinyImages, learn_tasks, tiny_learner
from trainer.learning.advice import Advice, advise

RULE = Rule("fitted", {"probability": 1.0, "ridge": 1.0})
SURE = 10.0  # score of the class that an image is answered as; 0 for all others


def advice(
    images: Sequence[tuple[int, int]],
    labels: Sequence[str | None] = ("apple", "pear", "plum"),
    counts: Sequence[int] | None = None,
    score: float = SURE,
    unscored: int = 0,
    weight: float = 1.0,
) -> Advice:
    """The advice for images (class, answered class); `unscored` more images of the last class were not left out.

    `weight` is what each image says about fresh ones.
    """
    columns = np.array([own for own, _ in images] + [len(labels) - 1] * unscored, np.int64)
    ridge = np.zeros((len(columns), len(labels)))
    ridge[np.arange(len(images)), [answer for _, answer in images]] = score
    ridge[len(images) :] = np.nan
    nothing = np.zeros_like(ridge)
    learned = np.bincount(columns, minlength=len(labels)) if counts is None else np.array(counts)
    keys = [f"image {number}" for number in range(len(columns))]
    scores = FrozenScores(nothing, nothing, ridge, nothing, nothing, nothing)
    return advise(scores, RULE, keys, columns, labels, learned, np.full(len(columns), weight))


def right(*counts: int) -> list[tuple[int, int]]:
    """Images that are answered correctly."""
    return [(c, c) for c, count in enumerate(counts) for _ in range(count)]


def test_nothing_is_advised_when_many_images_are_all_answered_correctly() -> None:
    assert advice(right(20, 20, 20)) == Advice()


def test_classes_that_are_answered_as_each_other_are_a_confused_pair() -> None:
    (pair,) = advice([*right(8, 8, 10), (0, 1), (0, 1), (1, 0), (1, 0)]).confused
    assert (pair.classes, pair.images) == (("apple", "pear"), 4)
    assert pair.share == pytest.approx(0.2)


def test_a_small_class_that_is_answered_as_a_large_one_is_confused_with_it() -> None:
    (pair,) = advice([*right(100, 2, 10), (1, 0), (1, 0)]).confused
    assert pair.classes == ("apple", "pear")
    assert pair.share == pytest.approx(0.25)


def test_one_wrong_answer_is_not_a_confused_pair() -> None:
    assert advice([*right(2, 2, 2), (0, 1)]).confused == ()


def test_two_wrong_answers_of_many_are_not_a_confused_pair() -> None:
    assert advice([*right(40, 40, 40), (0, 1), (1, 0)]).confused == ()


def test_the_most_confused_of_many_pairs_come_first_and_five_are_named() -> None:
    names = [f"class {c}" for c in range(12)]
    wrong = [(2 * pair, 2 * pair + 1) for pair in range(6) for _ in range(2 + pair)]
    found = advice([*right(*[5] * 12), *wrong], names).confused
    assert [pair.classes[0] for pair in found] == ["class 10", "class 8", "class 6", "class 4", "class 2"]


def test_merged_classes_are_not_confused_and_count_together() -> None:
    labels = ("apple", "apple", "plum")
    found = advice([*right(1, 1, 20), *[(0, 1), (1, 0)] * 8], labels)
    assert found == Advice()


def test_a_retired_class_is_not_mentioned() -> None:
    found = advice([*right(20, 0, 20), *[(1, 0)] * 3], ("apple", None, "plum"))
    assert found == Advice()


def test_an_image_that_surely_looks_like_another_class_has_a_suspicious_label() -> None:
    (image,) = advice([*right(20, 20, 20), (2, 1)]).wrong_labels
    assert (image.image, image.label, image.looks_like) == ("image 60", "plum", "pear")
    assert image.share > 0.99


def test_an_unsure_wrong_answer_is_not_a_suspicious_label() -> None:
    assert advice([*right(20, 20, 20), (2, 1)], score=1.5).wrong_labels == ()


def test_at_most_ten_suspicious_labels_are_named() -> None:
    assert len(advice([*right(30, 30, 30), *[(0, 1)] * 14]).wrong_labels) == 10


def test_the_networks_evidence_does_not_count() -> None:
    """The rule's weight of `probability` is ignored: the networks have seen most kept images."""
    frozen = Rule("fitted", {"ridge": 1.0})
    ridge = np.eye(2)[[0, 1, 0]] * SURE
    nothing = np.zeros((3, 2))
    scores = FrozenScores(nothing, nothing, ridge, nothing, nothing, nothing)
    columns, counts = np.array([0, 1, 1]), np.array([1, 2])
    both = [advise(scores, rule, list("abc"), columns, ("x", "y"), counts, np.ones(3)) for rule in (RULE, frozen)]
    assert both[0] == both[1]
    assert [image.image for image in both[0].wrong_labels] == ["c"]


def test_a_class_with_one_image_is_always_weak_and_comes_first() -> None:
    unsure = [(0, 1)] * 6  # wrong, but not suspicious
    first, *_ = advice([*right(6, 12), *unsure], score=1.0, unscored=1).weak
    assert (first.name, first.images, first.more) == ("plum", 1, 10)


def test_of_equally_good_classes_the_one_with_few_images_is_weak() -> None:
    (weak,) = advice(right(20, 4, 20)).weak
    assert (weak.name, weak.images, weak.more) == ("pear", 4, 10)


def test_of_equally_large_classes_the_one_with_errors_is_weak_and_should_double() -> None:
    (weak,) = advice([*right(20, 14, 20), *[(1, 0)] * 6], score=1.0).weak
    assert (weak.name, weak.images, weak.more) == ("pear", 20, 20)
    assert weak.error == pytest.approx(0.3, abs=0.05)


def test_a_weak_class_with_images_of_few_scenes_needs_images_of_others() -> None:
    assert advice(right(20, 6, 20), weight=1 / 3).weak[0].scenes == 2
    assert advice(right(20, 6, 20), weight=1 / 2).weak[0].scenes is None


def test_a_suspicious_label_does_not_make_its_class_weak() -> None:
    found = advice([*right(20, 14, 20), *[(1, 0)] * 6])
    assert len(found.wrong_labels) == 6
    assert found.weak == ()


def test_a_large_class_of_which_few_images_are_kept_is_not_weak() -> None:
    assert advice(right(2, 2, 2), counts=(200, 200, 200)).weak == ()


def test_at_most_three_weak_classes_and_fifty_images_are_asked_for() -> None:
    names = [f"class {c}" for c in range(5)]
    wrong = [(c, (c + 1) % 5) for c in range(5) for _ in range(10)]
    weak = advice([*right(*[10] * 5), *wrong], names, counts=[200] * 5, score=1.0).weak
    assert [entry.more for entry in weak] == [50, 50, 50]


def test_a_single_class_is_not_confused() -> None:
    assert advice(right(20), ("apple",)) == Advice()


def test_before_any_image_is_left_out_only_the_numbers_of_images_count() -> None:
    found = advice([], ("apple", "pear"), counts=(1, 40), unscored=1)
    assert [weak.name for weak in found.weak] == ["apple"]
    assert found.confused == found.wrong_labels == ()


def test_a_batch_with_a_wrong_label_names_the_image() -> None:
    batch = TinyImages().batch(["apple", "pear", "plum"], 20)
    batch["apple"].append("pear/50")
    (learned,) = learn_tasks(tiny_learner(replay_size=None), [batch])  # so that the image is kept
    (image,) = learned.verdict.advice.wrong_labels
    assert (image.image, image.label, image.looks_like) == ("pear/50", "apple", "pear")


def test_a_class_with_one_image_is_named_after_a_later_task() -> None:
    source = TinyImages()
    tasks = [source.batch(["apple", "pear"], 12), source.batch(["plum"], 1)]
    advice = learn_tasks(tiny_learner(), tasks)[-1].verdict.advice
    assert (advice.weak[0].name, advice.weak[0].images) == ("plum", 1)


def test_the_papers_rule_gets_advice_too() -> None:
    batch = TinyImages().batch(["apple", "pear", "plum"], 20)
    batch["apple"].append("pear/50")
    (learned,) = learn_tasks(tiny_learner(rule="paper", replay_size=None), [batch])
    assert [image.image for image in learned.verdict.advice.wrong_labels] == ["pear/50"]
