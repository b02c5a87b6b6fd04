"""The cascade: which networks run, what counts for those that do not, and that servers compute no more than that."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.inference.cascade import NEVER, Cascade, without_others
from models.inference.evidence import FrozenScores, log_coefficients, log_probabilities
from models.inference.model import Model
from models.inference.rules import Rule
from models.inference.runtime import Runtime
from tests.support.evidence import class_counts, quick, random_evidence, seeds
from tests.support.exported import SCENE_TASKS, SCENES, Exported, learn, pixels_of, read_scene

RIDGE = {"ridge": 1.0}
EVERYTHING = Cascade(RIDGE, np.inf, 99)


def by_ridge(*rows: list[float]) -> FrozenScores:
    ridge = np.array(rows)
    ones, nothing = np.ones_like(ridge), np.zeros_like(ridge)
    return FrozenScores(ones, nothing, ridge, ones, ones, nothing)


def test_the_networks_within_the_margin_of_the_best_class_run() -> None:
    frozen = by_ridge([0.9, 0.1, 0.8, 0.0, 0.7], [0.1, 0.2, 0.3, 0.9, 0.0])  # tasks: two classes, one, two
    chosen = Cascade(RIDGE, 0.15, 3).choose(frozen, (2, 1, 2))
    assert chosen.tolist() == [[True, True, False], [False, False, True]]


def test_at_most_so_many_networks_run_and_at_least_one() -> None:
    frozen = by_ridge([0.3, 0.2, 0.1], [np.nan, np.nan, np.nan])
    assert Cascade(RIDGE, np.inf, 2).choose(frozen, (1, 1, 1)).tolist() == [[True, True, False], [True, False, False]]
    assert Cascade(RIDGE, 0.0, 2).choose(frozen, (1, 1, 1))[0].tolist() == [True, False, False]


def test_no_network_runs_for_an_image_whose_best_class_is_far_above_the_second() -> None:
    frozen = by_ridge([0.9, 0.1, 0.2], [0.9, 0.5, 0.2], [0.9, 0.85, 0.2], [np.nan, np.nan, np.nan])
    chosen = Cascade(RIDGE, 0.1, 2, sure=0.4).choose(frozen, (1, 1, 1))
    assert chosen.tolist() == [[False] * 3, [False] * 3, [True, True, False], [True, False, False]]
    assert Cascade(RIDGE, 0.1, 2, sure=0.7).choose(by_ridge([0.9, 0.1]), (2,)).tolist() == [[False]]  # a single task
    assert Cascade(RIDGE, 0.1, 2, sure=0.7).choose(by_ridge([0.9]), (1,)).tolist() == [[True]]  # a single class


@quick
@given(seeds, class_counts, st.booleans())
def test_without_networks_the_frozen_evidence_decides_alone(seed: int, counts: list[int], has_ood: bool) -> None:
    evidence = replace(random_evidence(seed, counts), has_ood=has_ood)
    filled = without_others(evidence, np.zeros((len(evidence.frozen.ridge), len(counts)), bool))
    said = "probability" if has_ood else "logit"
    rng, tasks = np.random.default_rng(seed), len(counts)
    scales, shifts = tuple(rng.uniform(0.3, 2, tasks).tolist()), tuple(rng.normal(size=tasks).tolist())
    rule = Rule("all", {said: 1.0, "coefficient": 1.0, "task_cosine": 1.0, "ridge": 1.0}, scales, shifts)
    scores = rule.log_scores(filled) - evidence.frozen.ridge
    assert np.isfinite(scores).all()
    np.testing.assert_allclose(scores, np.broadcast_to(scores[:, :1], scores.shape), atol=1e-9)


@quick
@given(seeds, class_counts, st.integers(1, 4), st.floats(0, 2))
def test_networks_that_did_not_run_never_favour_their_classes(
    seed: int, counts: list[int], most: int, margin: float
) -> None:
    evidence = random_evidence(seed, counts)
    chosen = Cascade(RIDGE, margin, most).choose(evidence.frozen, evidence.counts)
    filled = without_others(evidence, chosen)
    ran = np.repeat(chosen, counts, axis=1)
    log_p, cosines, coefficients = log_probabilities(filled), filled.class_cosines, log_coefficients(filled)
    np.testing.assert_allclose(log_p[ran], log_probabilities(evidence)[ran])
    assert np.isfinite(log_p).all()
    for i in range(len(chosen)):
        assert (log_p[i][~ran[i]] <= log_p[i][ran[i]].min() + 1e-9).all()
        assert (cosines[i][~ran[i]] <= cosines[i][ran[i]].min()).all()
        assert (coefficients[i][~chosen[i]] <= coefficients[i][chosen[i]].min()).all()
    undecided = np.repeat([-np.log(count + 1) for count in counts], counts)
    assert (log_p <= np.where(ran, 0, undecided) + 1e-9).all()


@quick
@given(seeds, class_counts)
def test_a_cascade_that_runs_everything_changes_nothing(seed: int, counts: list[int]) -> None:
    evidence = random_evidence(seed, counts)
    assert without_others(evidence, EVERYTHING.choose(evidence.frozen, evidence.counts)) is evidence


def test_what_networks_would_have_said_does_not_matter_if_they_did_not_run() -> None:
    one, other = random_evidence(0, [2, 2, 1]), random_evidence(1, [2, 2, 1])
    chosen = np.tile([True, False, False], (6, 1))
    mixed = replace(other, class_logits=np.column_stack([one.class_logits[:, :2], other.class_logits[:, 2:]]))
    mixed = replace(
        mixed,
        frozen=one.frozen,
        ood_logits=np.column_stack([one.ood_logits[:, :1], other.ood_logits[:, 1:]]),
        class_distances=np.column_stack([one.class_distances[:, :2], other.class_distances[:, 2:]]),
        class_cosines=np.column_stack([one.class_cosines[:, :2], other.class_cosines[:, 2:]]),
    )
    rule = Rule("all", {"probability": 1.0, "coefficient": 1.0, "task_cosine": 1.0, "ridge": 1.0})
    found = [rule.log_scores(without_others(evidence, chosen)) for evidence in (one, mixed)]
    np.testing.assert_array_equal(*found)


def test_a_rule_with_a_cascade_survives_json() -> None:
    rule = Rule("fitted", {"ridge": 0.3}, (0.9,), (0.1,), Cascade({"ridge": 0.5}, 1.25, 2, 0.75))
    assert Rule.from_dict(json.loads(json.dumps(rule.to_dict()))) == rule
    assert "cascade" not in Rule().to_dict()
    older = {"weights": {"ridge": 0.5}, "margin": 1.25, "most": 2}
    assert Cascade.from_dict(older) == Cascade({"ridge": 0.5}, 1.25, 2, NEVER)


@pytest.fixture(scope="module")
def model(small: Exported) -> Model:
    return learn(small.backbone, SCENE_TASKS, read_scene, epochs=1)


def test_a_server_runs_the_chosen_networks_only_and_gives_the_same_evidence(
    small: Exported, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = pixels_of(small.backbone, [read_scene(key) for key in SCENES[::9]])  # more than one chunk
    with_cascade = replace(model, rule=replace(model.rule, cascade=Cascade(RIDGE, np.inf, 1)))
    exact = small.runtime.features(replace(model, rule=Rule()), pixels)
    images = 0
    task_features = Runtime.task_features

    def counted(runtime: Runtime, tokens: np.ndarray, task: object) -> object:  # type: ignore[type-arg]
        nonlocal images
        images += len(tokens)
        return task_features(runtime, tokens, task)  # type: ignore[arg-type]

    monkeypatch.setattr(Runtime, "task_features", counted)
    served = small.runtime.features(with_cascade, pixels)
    assert images == len(pixels) > 32
    assert served.ran is not None
    assert served.ran.sum(axis=1).tolist() == [1] * len(pixels)
    assert set(np.argmax(served.ran, axis=1).tolist()) == {0, 1}
    ours, expected = with_cascade.evidence(served), with_cascade.evidence(exact)
    np.testing.assert_allclose(ours.class_logits, expected.class_logits, atol=1e-4)
    np.testing.assert_allclose(ours.class_distances, expected.class_distances, rtol=1e-3)
