import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.answer import NOTHING_KNOWN, answer
from models.inference.calibration import REFERENCE_POINTS, Calibration, p_novel
from models.inference.evidence import Evidence
from models.inference.rules import RULES, Rule
from tests.support.tiny_model import bare_model

Floats = NDArray[np.float64]
quick = settings(max_examples=50, deadline=None)
seeds = st.integers(0, 2**32 - 1)
tasks = st.lists(st.integers(1, 4), min_size=1, max_size=4)  # classes of each task
FROZEN_WEIGHT = {"frozen_weight": 0.3}


def random_evidence(seed: int, counts: list[int], n: int = 6) -> Evidence:
    rng = np.random.default_rng(seed)
    return Evidence(
        logits=[rng.normal(0, 3, (n, c + 1)) for c in counts],
        distances=[rng.uniform(0.5, 30, (n, c)) for c in counts],
        frozen=rng.uniform(0.5, 10, (n, sum(counts))),
    )


def algorithm_2(evidence: Evidence, image: int) -> Floats:
    """The pseudo-code of the paper for one image, with probabilities and not their logarithms."""
    outputs: list[float] = []
    for logits, distances in zip(evidence.logits, evidence.distances, strict=True):
        exponentials = np.exp(logits[image])
        p = exponentials / exponentials.sum()  # `ood`, the last, is in the denominator
        s = max(1 / md for md in distances[image])
        outputs += [float(p[c] * s) for c in range(len(p) - 1)]
    return np.array(outputs)


@quick
@given(seeds, tasks)
def test_the_rule_paper_is_algorithm_2(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scores = Rule("paper").log_scores(evidence)
    for i in range(len(scores)):
        expected = algorithm_2(evidence, i)
        np.testing.assert_allclose(np.exp(scores[i]), expected, rtol=1e-9)
        assert scores[i].argmax() == expected.argmax()
        assert np.exp(scores[i].max()) == pytest.approx(expected.max(), rel=1e-9)


@quick
@given(seeds, tasks)
def test_the_rule_product_is_algorithm_2_times_the_frozen_likelihood(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scores = Rule("product", FROZEN_WEIGHT).log_scores(evidence)
    for i in range(len(scores)):
        likelihood = np.exp(-(evidence.frozen[i] ** 2) / 2)
        np.testing.assert_allclose(np.exp(scores[i]), algorithm_2(evidence, i) * likelihood**0.3, rtol=1e-9)


@quick
@given(seeds, tasks)
def test_a_product_with_no_frozen_weight_is_the_paper(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    product = Rule("product", {"frozen_weight": 0.0}).log_scores(evidence)
    np.testing.assert_array_equal(product, Rule("paper").log_scores(evidence))


@quick
@given(seeds, tasks, st.sampled_from([0.5, 1.0, 4.0]), st.sampled_from(["paper", "plain", "product"]))
def test_a_temperature_divides_every_logit_and_one_is_the_papers(
    seed: int, counts: list[int], temperature: float, name: str
) -> None:
    evidence = random_evidence(seed, counts)
    cooled = replace(evidence, logits=[x / temperature for x in evidence.logits])
    scores = Rule(name, {**FROZEN_WEIGHT, "temperature": temperature}).log_scores(evidence)
    np.testing.assert_allclose(scores, Rule(name, FROZEN_WEIGHT).log_scores(cooled), rtol=1e-12)


@quick
@given(seeds, tasks)
def test_the_rule_plain_is_the_probabilities_alone(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    alone = replace(evidence, distances=[np.ones_like(x) for x in evidence.distances])
    scores = Rule("plain").log_scores(evidence)
    np.testing.assert_allclose(np.exp(scores), [algorithm_2(alone, i) for i in range(len(scores))], rtol=1e-9)


@quick
@given(seeds, tasks)
def test_the_rule_frozen_prefers_the_nearest_class_mean(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    scores = Rule("frozen").log_scores(evidence)
    np.testing.assert_allclose(scores, -(evidence.frozen**2) / 2)
    assert (scores.argmax(axis=1) == evidence.frozen.argmin(axis=1)).all()


def test_the_rule_logits_concatenates_the_heads_without_ood() -> None:
    evidence = Evidence(
        [np.array([[1.0, 2.0, 9.0]]), np.array([[3.0, 8.0]])], [np.ones((1, 2)), np.ones((1, 1))], np.ones((1, 3))
    )
    assert Rule("logits").log_scores(evidence).tolist() == [[1.0, 2.0, 3.0]]


@quick
@given(seeds, tasks, st.sampled_from(["paper", "product", "plain", "frozen"]), st.floats(-1e3, 1e3))
def test_shifting_all_logits_of_a_task_changes_nothing(seed: int, counts: list[int], name: str, shift: float) -> None:
    evidence = random_evidence(seed, counts)
    shifted = replace(evidence, logits=[evidence.logits[0] + shift, *evidence.logits[1:]])
    rule = Rule(name, FROZEN_WEIGHT)
    np.testing.assert_allclose(rule.log_scores(shifted), rule.log_scores(evidence), rtol=1e-9, atol=1e-9)


def test_extreme_evidence_stays_finite_and_ordered() -> None:
    logits = [np.array([[1e4, -1e4, 0.0], [-1e4, -2e4, 1e4]]), np.array([[-1e4, 1e4], [0.0, 0.0]])]
    evidence = Evidence(logits, [np.array([[0.0, 5.0], [1e9, 1e9]]), np.ones((2, 1))], np.full((2, 3), 1e3))
    for name in RULES:
        scores = Rule(name, FROZEN_WEIGHT).log_scores(evidence)
        assert scores.shape == (2, 3)
        assert np.isfinite(scores).all()
    assert Rule("paper").log_scores(evidence).argmax(axis=1).tolist() == [0, 2]


def test_an_unknown_rule_is_named_with_those_that_are_known() -> None:
    with pytest.raises(ValueError, match="unknown rule 'magic'; this release knows paper, product"):
        Rule.from_dict({"name": "magic", "constants": {}})


def test_a_rule_survives_json() -> None:
    rule = Rule("product", FROZEN_WEIGHT)
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule


# ---- the answer


@quick
@given(seeds, tasks, st.sampled_from(["paper", "product", "plain", "frozen"]), st.floats(0, 1))
def test_an_image_is_novel_exactly_when_its_score_is_below_the_threshold(
    seed: int, counts: list[int], name: str, quantile: float
) -> None:
    evidence, rule = random_evidence(seed, counts), Rule(name, FROZEN_WEIGHT)
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
        assert 0 < sum(shares) <= 1 + 1e-12
        assert len({name for name, _ in one.nearest}) == len(shares)


def test_the_shares_of_the_nearest_classes_are_their_parts_of_the_whole_score() -> None:
    evidence = Evidence([np.log([[4.0, 2.0, 1.0, 1.0, 2.0]])], [np.ones((1, 4))], np.ones((1, 4)))
    calibration = Calibration(np.zeros(1), np.array([-np.inf]), np.array([[1.0, 0.5]]))
    (one,) = answer(bare_model([["a", "b", "c", "d"]], rule=Rule("paper"), calibration=calibration), evidence)
    assert one.label == "a"
    assert [name for name, _ in one.nearest] == ["a", "b", "c"]
    np.testing.assert_allclose([share for _, share in one.nearest], [0.5, 0.25, 0.125])


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


# ---- calibration

scores_of_known = st.lists(st.floats(-50, 5), min_size=1, max_size=60).map(np.array)


@quick
@given(scores_of_known, st.lists(st.floats(-60, 10), min_size=2, max_size=20))
def test_the_calibrated_score_is_a_quantile_and_rises_with_the_score(reference: Floats, scores: list[float]) -> None:
    calibration = Calibration.fit(reference, [np.ones(3)], 0.95)
    calibrated = calibration.calibrated(np.sort(scores))
    assert ((calibrated >= 0) & (calibrated <= 1)).all()
    assert (np.diff(calibrated) >= 0).all()
    assert calibration.calibrated(np.array([-1e6, 1e6])).tolist() == [0, 1]


def test_the_calibrated_score_by_hand() -> None:
    calibration = Calibration.fit(np.array([3.0, 1.0, 2.0, 2.0]), [np.ones(3)], 0.95)
    assert calibration.calibrated(np.array([0.0, 1.0, 1.5, 2.0, 9.0])).tolist() == [0, 0.125, 0.25, 0.5, 1]


@quick
@given(scores_of_known, st.floats(0.51, 0.99))
def test_the_threshold_accepts_at_least_the_wanted_share(scores: Floats, accept: float) -> None:
    threshold = Calibration.fit(scores, [np.ones(3)], accept).threshold[0]
    assert (scores >= threshold).mean() >= accept - 1e-9


@quick
@given(seeds, st.floats(0.51, 0.99), st.sampled_from([400, 1000]))
def test_with_many_scores_the_threshold_accepts_the_wanted_share(seed: int, accept: float, count: int) -> None:
    scores = np.random.default_rng(seed).normal(size=count)
    calibration = Calibration.fit(scores, [np.ones(3)], accept)
    share = (scores >= calibration.threshold[0]).mean()
    assert accept - 1e-9 <= share < accept + 2 / count  # the image at the quantile and the one below it at most
    assert len(calibration.reference) == REFERENCE_POINTS
    assert calibration.calibrated(calibration.threshold)[0] == pytest.approx(1 - accept, abs=0.01)


# ---- the corollary on the open world


def test_p_novel_by_hand() -> None:
    # None of the two: 0.1 * 0.8 = 0.08, out of 0.9 + 0.2 + 0.08.
    assert p_novel(np.array([[0.9, 0.2]]))[0] == pytest.approx(0.08 / 1.18)
    assert p_novel(np.array([[0.5]]))[0] == pytest.approx(0.5)
    assert p_novel(np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])).tolist() == [1, 0, 0]


known = st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=5).map(np.array)


@quick
@given(known)
def test_the_tasks_and_the_novel_share_one_probability(p: Floats) -> None:
    novel = p_novel(p)
    none = (1 - p[:, 0]) * (1 - p[:, 1]) * (1 - p[:, 2])
    tasks = p / (p.sum(axis=1) + none)[:, None]  # P(x in X_k | D) of the corollary
    assert ((novel >= 0) & (novel <= 1)).all()
    np.testing.assert_allclose(tasks.sum(axis=1) + novel, 1)


@quick
@given(known, st.floats(0, 1))
def test_p_novel_rises_as_every_task_disowns_the_image(p: Floats, factor: float) -> None:
    assert (p_novel(p * factor) >= p_novel(p) - 1e-12).all()


@quick
@given(seeds, tasks)
def test_p_known_falls_with_the_distance_and_with_the_ood_logit(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    calibration = Calibration(np.zeros(1), np.zeros(1), np.tile([1.0, 0.5], (len(counts), 1)))
    p = calibration.p_known(evidence)
    assert p.shape == (6, len(counts))
    assert ((p >= 0) & (p <= 1)).all()
    farther = calibration.p_known(replace(evidence, distances=[x * 1.5 for x in evidence.distances]))
    assert (farther <= p).all()
    more_ood = [x + np.eye(x.shape[1])[-1] for x in evidence.logits]
    assert (calibration.p_known(replace(evidence, logits=more_ood)) <= p).all()


def test_p_known_by_hand() -> None:
    # Not `ood`: 3 of 4. Half-way at distance 2, where the tail is centred.
    calibration = Calibration(np.zeros(1), np.zeros(1), np.array([[np.log(2.0), 0.5]]))
    p = calibration.p_known(Evidence([np.log([[1.0, 2.0, 1.0]])], [np.array([[7.0, 2.0]])], np.zeros((1, 2))))
    assert p[0, 0] == pytest.approx(0.75 * 0.5)


def test_a_tail_is_half_way_where_the_accepted_share_of_a_tasks_own_images_ends() -> None:
    distances = np.exp(np.linspace(0, 1, 101))
    (centre, scale), (_, narrow) = Calibration.fit(np.zeros(5), [distances, np.full(9, 3.0)], 0.95).tails
    assert centre == pytest.approx(0.95)
    assert scale == pytest.approx(np.linspace(0, 1, 101).std())
    assert narrow == 0.02
