"""A version is fitted with its cascade: the same networks run for held-out images as later in a server."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.inference.cascade import NEVER, Cascade
from models.inference.evidence import FrozenScores
from models.inference.rules import Rule
from tests.support.tiny_model import class_tasks, features_of, learn_tasks, tiny_learner
from trainer.learning import evaluation
from trainer.learning.cascade_fit import fit_cascade
from trainer.learning.prior import Prior
from trainer.learning.settings import LearnerSettings


def scores_of(ridge: Any) -> FrozenScores:
    given = np.array(ridge, float)
    return FrozenScores(-given, given, given, -given, -given, given)


def test_the_margin_includes_the_own_task_of_the_asked_share_of_images() -> None:
    rng = np.random.default_rng(0)
    columns = np.repeat(np.arange(6), 50)
    left_out = scores_of(rng.normal(0, 1, (300, 6)) + 1.5 * np.eye(6)[columns])
    counts, tasks = (2, 2, 2), columns // 2
    for share in (0.9, 0.99):  # more than the best task alone reaches
        cascade = fit_cascade(left_out, columns, counts, Prior(), 3, share, 1.0)
        chosen = cascade.choose(left_out, counts)
        assert chosen[np.arange(300), tasks].mean() == pytest.approx(share, abs=0.01)
    limited = fit_cascade(left_out, columns, counts, Prior(), 2, 0.99, 1.0)
    assert limited.choose(left_out, counts).sum(axis=1).max() == 2


def test_images_that_were_not_left_out_do_not_count() -> None:
    ridge = np.array([[1.0, 0.0], [0.9, 0.0], [np.nan, np.nan]])
    cascade = fit_cascade(scores_of(ridge), np.array([0, 0, 1]), (1, 1), Prior(), 2, 1.0, 1.0)
    assert cascade.margin == 0
    assert np.isfinite(fit_cascade(scores_of(ridge[2:]), np.array([1]), (1, 1), Prior(), 2, 1.0, 1.0).margin)


def test_of_the_images_that_run_no_network_the_asked_share_has_the_class_of_the_frozen_evidence() -> None:
    rng = np.random.default_rng(1)
    columns, counts = np.repeat(np.arange(6), 500), (2, 2, 2)
    left_out, fresh = (scores_of(rng.normal(0, 1, (3000, 6)) + 2.5 * np.eye(6)[columns]) for _ in range(2))
    skipped = []
    for share in (0.9, 0.98):
        cascade = fit_cascade(left_out, columns, counts, Prior(), 2, 0.99, share)
        none = ~cascade.choose(fresh, counts).any(axis=1)
        skipped.append(float(none.mean()))
        assert (cascade.class_scores(fresh).argmax(axis=1) == columns)[none].mean() == pytest.approx(share, abs=0.015)
    assert skipped[0] > skipped[1] > 0.2
    few = np.arange(0, 3000, 100)  # 30 images, all right by chance, do not show 98 %
    one = fit_cascade(scores_of(3 * np.eye(6)[columns[few]]), columns[few], counts, Prior(), 2, 0.99, 0.98)
    assert one.choose(left_out, counts).any(axis=1).all()


@pytest.mark.parametrize(
    ("given", "networks"),
    [
        ({}, 2),
        ({"preset": "paper"}, None),
        ({"rule": "paper+c"}, None),
        ({"method": "hat-csi"}, None),
        ({"rule": "paper", "cascade": 3}, 3),
        ({"cascade": "off"}, None),
        ({"cascade": "4"}, 4),
    ],
)
def test_two_networks_run_per_image_unless_the_rule_is_the_papers(given: dict[str, Any], networks: int | None) -> None:
    assert LearnerSettings(**given).networks_per_image == networks


def test_the_rule_is_fitted_on_evidence_of_its_own_cascade(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    fit_trained = evaluation.fit_trained

    def recorded(evidence: Any, columns: Any, prior: Any) -> Rule:
        seen.append(evidence)
        return fit_trained(evidence, columns, prior)

    monkeypatch.setattr(evaluation, "fit_trained", recorded)
    learner = tiny_learner(cascade=1)
    model = learn_tasks(learner, class_tasks([2, 2, 2], images=12))[-1].model
    cascade, evidence = model.rule.cascade, seen[-1]
    assert cascade is not None
    assert cascade.most == 1
    np.testing.assert_array_equal(evidence.ran, cascade.choose(evidence.frozen, (2, 2, 2)))
    assert evidence.ran.sum(axis=1).max() == 1
    # The evidence of fresh images, computed from the features of all networks, uses no more than those that run.
    keys = [f"class {c}/{number}" for c in range(6) for number in range(100, 104)]
    features = features_of(learner, model, keys)
    chosen = model.networks_to_run(model.frozen.scores(features.frozen, features.expanded))
    assert chosen is not None
    others = [np.where(chosen[:, k : k + 1], z, 7.0).astype(np.float32) for k, z in enumerate(features.tasks)]
    one, other = (model.evidence(each) for each in (features, replace(features, tasks=others)))
    np.testing.assert_array_equal(model.rule.log_scores(one), model.rule.log_scores(other))


def test_with_the_papers_rule_at_least_one_network_runs_for_every_image() -> None:
    """It has no frozen terms: without a network all classes would have the same score."""
    model = learn_tasks(tiny_learner(rule="paper", cascade=1, sure_share=0.8), class_tasks([2, 2], images=60))[-1].model
    assert model.rule.cascade is not None
    assert model.rule.cascade.sure == NEVER
    fitted = learn_tasks(tiny_learner(cascade=1, sure_share=0.8), class_tasks([2, 2], images=60))[-1].model
    assert fitted.rule.cascade is not None
    assert fitted.rule.cascade.sure < NEVER


def test_without_a_cascade_all_networks_run() -> None:
    model = learn_tasks(tiny_learner(cascade="off"), class_tasks([2, 2, 2]))[-1].model
    assert model.rule.cascade is None
    assert "cascade" not in model.rule.to_dict()
    assert isinstance(learn_tasks(tiny_learner(), class_tasks([2, 2]))[-1].model.rule.cascade, Cascade)
