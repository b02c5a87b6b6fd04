from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.evidence import Evidence
from models.inference.rules import Rule
from tests.support.evidence import frozen_evidence
from tests.support.tiny_model import bare_model, tiny_settings
from trainer.learning.gate import auc, expected_accuracy, is_correct, judge, task_aucs

Floats = NDArray[np.float64]
quick = settings(max_examples=60, deadline=None)
few = st.lists(st.integers(0, 5).map(float), max_size=12).map(lambda x: np.array(x, float))  # few values: many ties


@quick
@given(few, few)
def test_auc_is_the_share_of_correctly_ordered_pairs(positive: Floats, negative: Floats) -> None:
    pairs = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive for n in negative]
    expected = sum(pairs) / len(pairs) if pairs else None
    assert auc(positive, negative) == (None if expected is None else pytest.approx(expected))


# Two old tasks with one class each, and a new one. The rule answers with the nearest class.
NEAREST = Rule("nearest", {"frozen_distance": 1.0})
PARENT = bare_model([["a"], ["b"]], rule=NEAREST)
CHILD = bare_model([["a"], ["b"], ["c"]], rule=NEAREST)


def evidence(distances: Sequence[Sequence[float]]) -> Evidence:
    return frozen_evidence(distances)


def test_accuracy_counts_images_whose_best_class_is_their_label() -> None:
    found = is_correct(CHILD, evidence([[1, 2, 3], [1, 2, 3], [3, 2, 1], [3, 2, 1]]), ["a", "b", "c", "never learned"])
    assert found.tolist() == [True, False, True, False]


def test_the_auc_of_a_task_compares_its_own_best_score_with_all_other_images() -> None:
    model = bare_model([["a", "b"], ["c"]], rule=NEAREST)
    seen, labels = evidence([[1, 9, 5], [9, 2, 5], [3, 9, 0], [1.5, 9, 0]]), ["a", "b", "c", "c"]
    # Smallest distances to the first task: 1 and 2 for its images, 3 and 1.5 for the others. 3 of 4 pairs are ordered.
    assert task_aucs(model, seen, labels) == [0.75, 1.0]
    assert task_aucs(model, seen, ["a", "b", "a", "b"])[0] is None


def gate_case(wrong: int, of: int = 20) -> tuple[Evidence, Evidence, list[str]]:
    """The parent is right on `of` images of each class; the child answers c for `wrong` of each."""
    labels = ["a"] * of + ["b"] * of
    before = [[1, 2]] * of + [[2, 1]] * of
    after = [[1, 2, 0 if i < wrong else 3] for i in range(of)] + [[2, 1, 0 if i < wrong else 3] for i in range(of)]
    return evidence(before), evidence(after), labels


def judged(wrong: int, margin: float) -> tuple[bool, tuple[str, ...]]:
    before, after, labels = gate_case(wrong)
    verdict = judge(PARENT, CHILD, before, after, labels, None, tiny_settings(gate_accuracy=margin, gate_auc=1.0))
    assert verdict.tasks[0].accuracy_before == 1
    assert verdict.tasks[0].accuracy_after == pytest.approx(1 - wrong / 20)
    assert verdict.tasks[2].accuracy_before is None
    assert verdict.tasks[2].images == 0
    return verdict.accepted, verdict.reasons


def test_the_gate_accepts_a_loss_within_the_margin() -> None:
    assert judged(wrong=2, margin=0.15) == (True, ())


def test_the_gate_rejects_a_loss_of_accuracy_beyond_the_margin_and_reports_it() -> None:
    accepted, (reason,) = judged(wrong=4, margin=0.15)
    assert not accepted
    assert "accuracy fell from 1.000 to 0.800, more than 0.15" in reason
    assert "OPENWORLD_TRAIN_GATE_ACCURACY" in reason


@quick
@given(st.integers(0, 20), st.floats(0, 1))
def test_the_gate_rejects_exactly_beyond_the_margin(wrong: int, margin: float) -> None:
    if abs(wrong / 20 - margin) > 1e-9:
        assert judged(wrong, margin)[0] == (wrong / 20 < margin)


def auc_case(mixed: int) -> tuple[Evidence, Evidence, list[str]]:
    """Twenty images of a and of b; under the child, `mixed` images of b are nearer to a than any image of a."""
    labels = ["a"] * 20 + ["b"] * 20
    before = evidence([[1, 4]] * 20 + [[3, 1]] * 20)
    after = evidence([[1, 4, 9]] * 20 + [[0.9 if i < mixed else 3, 0.5, 9] for i in range(20)])
    return before, after, labels


def test_the_gate_rejects_a_loss_of_auc_when_accuracy_is_unchanged() -> None:
    settings = tiny_settings(gate_accuracy=0.15, gate_auc=0.1)
    before, after, labels = auc_case(mixed=10)
    verdict = judge(PARENT, CHILD, before, after, labels, None, settings)
    # The AUC of a falls to one half, that of b stays at 1.
    assert (verdict.tasks[0].auc_before, verdict.tasks[0].auc_after) == (1.0, 0.5)
    assert [r.accuracy_after for r in verdict.tasks[:2]] == [1, 1]
    (reason,) = verdict.reasons
    assert "AUC fell from 1.000 to 0.750, more than 0.1" in reason
    assert "OPENWORLD_TRAIN_GATE_AUC" in reason
    assert judge(PARENT, CHILD, *auc_case(mixed=2), None, settings).accepted


def test_old_tasks_are_weighted_by_their_images() -> None:
    # a: 30 images, all correct; b: 2 images, both wrong. 2 of 32 is within the margin.
    labels = ["a"] * 30 + ["b"] * 2
    before = evidence([[1, 2]] * 30 + [[2, 1]] * 2)
    after = evidence([[1, 2, 3]] * 30 + [[2, 1, 0]] * 2)
    assert judge(PARENT, CHILD, before, after, labels, None, tiny_settings(gate_accuracy=0.15)).accepted
    assert not judge(PARENT, CHILD, before, after, labels, None, tiny_settings(gate_accuracy=0.05)).accepted


def test_a_first_version_is_accepted() -> None:
    first = bare_model([["a", "b"]], rule=NEAREST)
    verdict = judge(None, first, None, evidence([[2, 1], [2, 1]]), ["a", "b"], None, tiny_settings())
    assert verdict.accepted
    assert verdict.tasks[0].accuracy_after == 0.5
    assert verdict.tasks[0].accuracy_before is None
    assert verdict.tasks[0].auc_after is None


def test_a_verdict_is_a_dictionary_with_accepted_and_the_reports() -> None:
    before, after, labels = gate_case(wrong=20)
    data = judge(PARENT, CHILD, before, after, labels, None, tiny_settings()).to_dict()
    assert data["accepted"] is False
    assert data["tasks"][0]["accuracy_after"] == 0


def reported(held_out: int, trained: float, closed: float, every: float = 0.7, images: int = 1000) -> float:
    """What a version reports: shares of right answers to held-out images, and in closed form to all left-out ones."""
    correct, few = (np.arange(held_out) < share * held_out for share in (trained, closed))
    others = np.arange(images - held_out) < every * images - closed * held_out
    return expected_accuracy(correct, np.concatenate([few, others]), np.ones(images), np.arange(images) < held_out)


def test_a_version_reports_what_many_held_out_images_show() -> None:
    assert reported(300, 0.8, 0.7) == pytest.approx(0.77, abs=0.01)  # training changes the answers to a tenth of them
    assert reported(300, 0.6, 0.6) == pytest.approx(0.62, abs=0.01)  # whole scenes are harder than other images


@pytest.mark.parametrize(("trained", "closed"), [(1.0, 1.0), (0.4, 0.4), (0.9, 0.7), (0.5, 0.7)])
def test_few_held_out_images_move_the_reported_accuracy_little(trained: float, closed: float) -> None:
    """They are easy or hard, or training gains or loses on them: by chance."""
    assert reported(10, trained, closed) == pytest.approx(0.7, abs=0.03)


def test_images_of_a_scene_move_the_reported_accuracy_as_one() -> None:
    """Ten of a hundred are held out. Of these one is wrong, or ten are, which are of one scene."""
    held_out, wrong = np.arange(100) < 10, np.arange(100) < 1
    weights = np.ones(100)
    alone = expected_accuracy(~wrong[held_out], ~wrong, weights, held_out)
    frames = np.arange(109) < 19
    wrong, weights = np.arange(109) < 10, np.where(np.arange(109) < 10, 0.1, 1.0)
    assert expected_accuracy(~wrong[frames], ~wrong, weights, frames) == pytest.approx(alone)
    assert expected_accuracy(~wrong[frames], ~wrong, np.ones(109), frames) < alone - 0.05


@quick
@given(st.data())
def test_the_reported_accuracy_is_a_share(data: st.DataObject) -> None:
    images = data.draw(st.integers(1, 40))
    held_out = np.array(data.draw(st.lists(st.booleans(), min_size=images, max_size=images)), bool)
    held_out[0] = True
    answers = st.lists(st.booleans(), min_size=images, max_size=images)
    correct, closed_form = (np.array(data.draw(answers), bool) for _ in range(2))
    weights = np.array(data.draw(st.lists(st.floats(0.05, 1), min_size=images, max_size=images)))
    assert -1e-9 <= expected_accuracy(correct[held_out], closed_form, weights, held_out) <= 1 + 1e-9


@pytest.mark.parametrize(("held_out", "bias"), [(8, 0.043), (40, 0.033), (160, 0.02)])
def test_a_version_reports_the_accuracy_of_fresh_images_more_closely_than_held_out_images_alone(
    held_out: int, bias: float
) -> None:
    """Of five times as many left-out images. Training changes the answers to a fifth, and is right on 85 % of these."""
    rng, images, truth = np.random.default_rng(0), 5 * held_out, 0.65 * 0.8 + 0.85 * 0.2
    alone, compared = [], []
    for _ in range(500):
        closed_form, changed = rng.random(images) < 0.65, rng.random(held_out) < 0.2
        correct = np.where(changed, rng.random(held_out) < 0.85, closed_form[:held_out])
        alone.append(correct.mean() - truth)
        compared.append(expected_accuracy(correct, closed_form, np.ones(images), np.arange(images) < held_out) - truth)
    assert np.square(compared).mean() < 0.8 * np.square(alone).mean()
    assert -bias < np.mean(compared) < 0  # a part of the gain of training, 0.04, is not believed
