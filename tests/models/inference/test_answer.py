"""Answers: known or novel by the threshold, and the shares of the nearest classes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.answer import NOTHING_KNOWN, SURE_SHARE, Answer, answer, certainty
from models.inference.calibration import Calibration
from models.inference.evidence import Evidence
from models.inference.rules import Rule
from tests.support.evidence import class_counts, quick, random_evidence, seeds
from tests.support.tiny_model import bare_model


@quick
@given(seeds, class_counts, st.sampled_from(["paper", "product", "plain", "frozen"]), st.floats(0, 1))
def test_an_image_is_novel_exactly_when_its_score_is_below_the_threshold(
    seed: int, counts: list[int], name: str, quantile: float
) -> None:
    evidence, rule = random_evidence(seed, counts), Rule(name, {"frozen_weight": 0.3})
    names = [[f"{k}.{c}" for c in range(count)] for k, count in enumerate(counts)]
    log_scores = rule.log_scores(evidence)
    best = log_scores.max(axis=1)
    threshold = float(np.quantile(best, quantile, method="nearest"))  # one of the scores: equality counts as known
    calibration = Calibration(np.sort(best), np.array([threshold]), np.tile([1.0, 0.5], (len(counts), 1)))
    answers = answer(bare_model(names, rule=rule, calibration=calibration), evidence)
    assert len(answers) == len(best)
    flat = [name for task in names for name in task]
    for i, one in enumerate(answers):
        winner = flat[int(log_scores[i].argmax())]
        assert one.score == best[i]
        assert one.novel == (best[i] < threshold)
        assert one.label == (None if one.novel else winner)
        assert one.task == int(winner.split(".")[0])
        assert 0 <= one.calibrated_score <= 1
        assert 0 <= one.p_novel <= 1
        shares = [share for _, share in one.nearest]
        assert one.nearest[0][0] == winner
        assert len(shares) == min(3, len(flat))
        assert shares == sorted(shares, reverse=True)
        assert 0 <= sum(shares) <= (0.5 if one.novel else 1) + 1e-12
        assert len({name for name, _ in one.nearest}) == len(shares)


def answer_with(scores: list[float], *, p_not_ood: float, threshold: float) -> Answer:
    """The answer of one task whose head gives these probabilities; p_novel is 1 - `p_not_ood`."""
    probabilities = p_not_ood * np.array(scores) / sum(scores)
    evidence = Evidence(
        [np.log([[*probabilities, 1 - p_not_ood]])], [np.ones((1, len(scores)))], np.ones((1, len(scores)))
    )
    calibration = Calibration(np.zeros(1), np.array([threshold]), np.array([[60.0, 0.5]]))  # every distance is near
    names = [chr(ord("a") + c) for c in range(len(scores))]
    (one,) = answer(bare_model([names], rule=Rule("paper"), calibration=calibration), evidence)
    assert one.p_novel == pytest.approx(1 - p_not_ood)
    return one


KNOWN, NOVEL = -np.inf, np.inf  # thresholds


def test_shares_are_parts_of_the_score_times_the_probability_of_a_known_class() -> None:
    one = answer_with([4, 2, 1, 1], p_not_ood=0.8, threshold=KNOWN)
    assert one.label == "a"
    assert [name for name, _ in one.nearest] == ["a", "b", "c"]
    np.testing.assert_allclose([share for _, share in one.nearest], [0.4, 0.2, 0.1])


def test_shares_of_a_novel_image_are_small_when_p_novel_is_large() -> None:
    one = answer_with([3, 1], p_not_ood=0.04, threshold=NOVEL)
    assert one.novel
    np.testing.assert_allclose([share for _, share in one.nearest], [0.03, 0.01])


@pytest.mark.parametrize("scores", [[1.0], [1.0, 1e-300], [1e9, 1.0, 1.0]])
@pytest.mark.parametrize("p_not_ood", [0.5, 0.999, 1 - 1e-15])
def test_no_share_of_a_novel_image_exceeds_one_half_even_when_p_novel_is_tiny(
    scores: list[float], p_not_ood: float
) -> None:
    one = answer_with(scores, p_not_ood=p_not_ood, threshold=NOVEL)
    assert one.novel
    assert one.nearest[0] == ("a", pytest.approx(0.5))
    assert sum(share for _, share in one.nearest) <= 0.5 + 1e-12


@pytest.mark.parametrize("p_not_ood", [1e-9, 0.1, 0.5])
def test_the_shares_of_a_known_image_sum_to_at_least_one_half_even_when_p_novel_is_large(p_not_ood: float) -> None:
    one = answer_with([3, 1], p_not_ood=p_not_ood, threshold=KNOWN)
    assert not one.novel
    np.testing.assert_allclose([share for _, share in one.nearest], [0.375, 0.125])


def test_an_answer_is_sure_from_a_share_of_70_percent_on() -> None:
    assert SURE_SHARE == 0.7
    assert certainty("a", [("a", 0.7), ("b", 0.3)]) == "sure"
    assert certainty("a", [("a", np.nextafter(0.7, 0)), ("b", 0.3)]) == "unsure"
    assert certainty("a", [("a", np.nan)]) == "unsure"
    # Merged classes add up: the best class's label need not be the first one of `nearest`.
    assert certainty("a", [("b", 0.8), ("a", 0.2)]) == "unsure"
    assert certainty("a", []) == "unsure"
    assert certainty(None, [("a", 0.9)]) == certainty(None, []) == "novel"


def test_the_certainty_of_an_answer_follows_its_share() -> None:
    assert answer_with([8, 1], p_not_ood=0.99, threshold=KNOWN).certainty == "sure"  # 0.88
    assert answer_with([8, 1], p_not_ood=0.75, threshold=KNOWN).certainty == "unsure"  # 0.67
    assert answer_with([5, 4], p_not_ood=0.99, threshold=KNOWN).certainty == "unsure"  # 0.55
    assert answer_with([8, 1], p_not_ood=0.99, threshold=NOVEL).certainty == "novel"
    assert NOTHING_KNOWN.certainty == "novel"


def test_an_image_of_a_retired_class_is_novel_and_the_class_is_not_named() -> None:
    evidence = Evidence([np.log([[6.0, 3.0, 1.0]])], [np.ones((1, 2))], np.ones((1, 2)))
    calibration = Calibration(np.zeros(1), np.array([KNOWN]), np.array([[60.0, 0.5]]))
    model = bare_model([["a", "b"]], rule=Rule("paper"), calibration=calibration, aliases={"a": None})
    (one,) = answer(model, evidence)
    assert (one.label, one.novel) == (None, True)
    assert one.nearest == [("b", pytest.approx(0.5 / 3))]


def test_before_anything_is_learned_everything_is_novel() -> None:
    evidence = Evidence([], [], np.zeros((3, 0)))
    answers = answer(bare_model([], rule=Rule(), calibration=Calibration.empty()), evidence)
    assert answers == [NOTHING_KNOWN] * 3
    assert answers[0].novel
    assert answers[0].label is None
    assert answers[0].p_novel == 1


def test_a_score_that_is_not_a_number_is_never_a_known_class() -> None:
    evidence = Evidence([np.array([[np.nan, 0.0]])], [np.ones((1, 1))], np.ones((1, 1)))
    calibration = Calibration(np.zeros(1), np.zeros(1), np.array([[1.0, 0.5]]))
    (one,) = answer(bare_model([["a"]], rule=Rule("paper"), calibration=calibration), evidence)
    assert one.novel
