"""Answers: known or novel by the threshold, and the shares of the nearest classes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.answer import NOTHING_KNOWN, SURE_SHARE, Answer, answer, certainty
from models.inference.evidence import Evidence
from models.inference.novelty import SUMMARIES, Novelty
from models.inference.rules import Rule
from tests.support.evidence import class_counts, frozen_evidence, quick, random_evidence, seeds, with_parts
from tests.support.tiny_model import bare_model

KNOWN, NOVEL = -1e9, 1e9  # thresholds


def novelty(threshold: float, log_odds: float | None = None) -> Novelty:
    """A decision on the score of the best class; `log_odds` of being known for every image, if given."""
    logistic = np.array([1.0, 0.5]) if log_odds is None else np.array([1e-12, log_odds])
    weights = np.eye(len(SUMMARIES))[-1]
    return replace(Novelty.empty(), weights=weights, logistic=logistic, threshold=np.array([threshold]))


@quick
@given(seeds, class_counts, st.floats(0, 1))
def test_an_image_is_novel_exactly_when_p_novel_is_above_the_threshold(
    seed: int, counts: list[int], quantile: float
) -> None:
    evidence = random_evidence(seed, counts)
    names = [[f"{k}.{c}" for c in range(count)] for k, count in enumerate(counts)]
    log_scores = Rule().log_scores(evidence)
    best = log_scores.max(axis=1)
    decision = novelty(float(np.quantile(best, quantile, method="nearest")))  # equality counts as known
    flat = [name for task in names for name in task]
    order = np.argsort(best)
    answers = answer(bare_model(names, rule=Rule(), novelty=decision), evidence)
    assert (np.diff([answers[i].p_novel for i in order]) <= 0).all()
    for i, one in enumerate(answers):
        winner = flat[int(log_scores[i].argmax())]
        assert one.score == pytest.approx(best[i])
        assert one.novel == (one.p_novel > decision.novel_above) == (best[i] < decision.threshold[0])
        assert one.label == (None if one.novel else winner)
        assert one.task == int(winner.split(".")[0])
        shares = [share for _, share in one.nearest]
        assert one.nearest[0][0] == winner
        assert len(shares) == min(3, len(flat))
        assert shares == sorted(shares, reverse=True)
        assert 0 <= sum(shares) <= (0.5 if one.novel else 1) + 1e-12


def answer_with(scores: list[float], *, p_known: float, threshold: float) -> Answer:
    """The answer of one task whose classes have these scores."""
    evidence = with_parts(frozen_evidence(np.ones((1, len(scores)))), logits=[np.log([[*scores, 1.0]])])
    decision = novelty(threshold, float(np.log(p_known / (1 - p_known))))
    names = [chr(ord("a") + c) for c in range(len(scores))]
    (one,) = answer(bare_model([names], rule=Rule(), novelty=decision), evidence)
    assert one.p_novel == pytest.approx(1 - p_known)
    return one


def test_shares_are_parts_of_the_score_times_the_probability_of_a_known_class() -> None:
    one = answer_with([4, 2, 1, 1], p_known=0.8, threshold=KNOWN)
    assert one.label == "a"
    np.testing.assert_allclose([share for _, share in one.nearest], [0.4, 0.2, 0.1])


@pytest.mark.parametrize(("p_known", "share"), [(0.04, 0.03), (0.5, 0.375), (0.999, 0.375)])
def test_the_shares_of_a_novel_image_sum_to_at_most_one_half(p_known: float, share: float) -> None:
    one = answer_with([3, 1], p_known=p_known, threshold=NOVEL)
    assert one.novel
    assert one.nearest[0] == ("a", pytest.approx(share))


@pytest.mark.parametrize("p_known", [1e-9, 0.1, 0.5])
def test_the_shares_of_a_known_image_sum_to_at_least_one_half(p_known: float) -> None:
    one = answer_with([3, 1], p_known=p_known, threshold=KNOWN)
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
    assert answer_with([8, 1], p_known=0.99, threshold=KNOWN).certainty == "sure"  # 0.88
    assert answer_with([8, 1], p_known=0.75, threshold=KNOWN).certainty == "unsure"  # 0.67
    assert answer_with([8, 1], p_known=0.99, threshold=NOVEL).certainty == "novel"
    assert NOTHING_KNOWN.certainty == "novel"


def test_an_image_of_a_retired_class_is_novel_and_the_class_is_not_named() -> None:
    evidence: Evidence = with_parts(frozen_evidence(np.ones((1, 2))), logits=[np.log([[6.0, 3.0, 1.0]])])
    model = bare_model([["a", "b"]], rule=Rule(), novelty=novelty(KNOWN, 50.0), aliases={"a": None})
    (one,) = answer(model, evidence)
    assert (one.label, one.novel) == (None, True)
    assert one.nearest == [("b", pytest.approx(0.5 / 3))]


def test_before_anything_is_learned_everything_is_novel() -> None:
    answers = answer(bare_model([], rule=Rule(), novelty=Novelty.empty()), frozen_evidence(np.zeros((3, 0)), []))
    assert answers == [NOTHING_KNOWN] * 3
    assert answers[0].novel
    assert answers[0].p_novel == 1


def test_a_score_that_is_not_a_number_is_novel() -> None:
    evidence = with_parts(frozen_evidence(np.ones((1, 1))), logits=[np.array([[np.nan, 0.0]])])
    (one,) = answer(bare_model([["a"]], rule=Rule(), novelty=novelty(0.0)), evidence)
    assert (one.novel, one.p_novel) == (True, 1.0)
