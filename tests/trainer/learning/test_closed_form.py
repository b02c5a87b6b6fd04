"""The class decision without networks, and the comparison that decides whether they count."""

from dataclasses import fields, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from models.inference.answer import answer
from models.inference.evidence import Evidence, Features, FrozenScores
from models.inference.rules import FROZEN_TERMS, Rule
from tests.support.evidence import random_evidence, with_parts
from tests.support.tiny_model import class_tasks, features_of, learn_tasks, tiny_learner
from trainer.learning.closed_form import NAME, NetworkGain, fit_closed_form, network_gain
from trainer.learning.prior import Prior
from trainer.learning.rule_fit import fit_rule, prior_weights

COUNTS = [3, 3]
IMAGES = 240


@pytest.fixture
def columns() -> NDArray[np.int64]:
    return np.random.default_rng(1).integers(0, sum(COUNTS), IMAGES)


def frozen_knows(columns: NDArray[np.int64], strength: float, seed: int = 0) -> Evidence:
    """Evidence of which the ridge output alone says something about the class."""
    evidence = random_evidence(seed, COUNTS, n=len(columns))
    ridge = evidence.frozen.ridge + strength * np.eye(sum(COUNTS))[columns]
    return replace(evidence, frozen=replace(evidence.frozen, ridge=ridge))


def networks_know(columns: NDArray[np.int64], strength: float, seed: int = 0) -> Evidence:
    """The same, and every network knows its own classes and `ood`."""
    evidence, logits = frozen_knows(columns, 0.3, seed), []
    for k, (start, own) in enumerate(zip((0, COUNTS[0]), evidence.logits, strict=True)):
        place = columns - start
        target = np.where((place >= 0) & (place < COUNTS[k]), place, COUNTS[k])
        logits.append(own + strength * np.eye(COUNTS[k] + 1)[target])
    return with_parts(evidence, logits=logits)


def gain_of(evidence: Evidence, columns: NDArray[np.int64]) -> NetworkGain:
    everything, frozen = np.ones(len(columns), bool), evidence.frozen
    rules = fit_closed_form(frozen, columns, Prior()), fit_rule(evidence, columns, Prior())
    found = network_gain(evidence, everything, frozen, columns, Prior(), *rules, np.random.default_rng(0))
    assert found is not None
    return found


def test_the_closed_form_weighs_the_useful_term(columns: NDArray[np.int64]) -> None:
    evidence = frozen_knows(columns, 1.0)
    rule = fit_closed_form(evidence.frozen, columns, Prior())
    assert {*rule.weights} == {*FROZEN_TERMS}
    assert not rule.uses_networks
    assert rule.weights["ridge"] > 2 * max(rule.weights["frozen_distance"], rule.weights["frozen_cosine"])
    right = (rule.frozen_scores(evidence.frozen).argmax(axis=1) == columns).mean()
    prior = Rule("prior", prior_weights(evidence.frozen, Prior()))
    assert right > (prior.frozen_scores(evidence.frozen).argmax(axis=1) == columns).mean()


def test_its_gradient_vanishes_except_for_the_pull_of_the_prior(columns: NDArray[np.int64]) -> None:
    evidence, weak = frozen_knows(columns, 1.0), Prior(rule_strength=0.0)
    weights = fit_closed_form(evidence.frozen, columns, weak).weights

    def loss(change: dict[str, float]) -> float:
        scores = Rule(NAME, {name: weights[name] + change.get(name, 0.0) for name in weights}).frozen_scores(
            evidence.frozen
        )
        shares = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
        return -float(shares[np.arange(len(columns)), columns].sum())

    for name in (name for name in FROZEN_TERMS if weights[name] > 0):
        assert loss({name: 1e-3}) >= loss({}) - 1e-6
        assert loss({name: -1e-3}) >= loss({}) - 1e-6


def test_a_constant_in_the_scores_of_an_image_changes_nothing(columns: NDArray[np.int64]) -> None:
    """Float32 would lose the differences of large distances."""
    frozen = frozen_knows(columns, 1.0).frozen
    far = replace(frozen, distances=frozen.distances + 1000 * frozen.distances.std())
    found, expected = (fit_closed_form(scores, columns, Prior()).weights for scores in (far, frozen))
    assert found == pytest.approx(expected, rel=1e-3)


def test_images_that_were_not_left_out_do_not_count(columns: NDArray[np.int64]) -> None:
    frozen = frozen_knows(columns, 1.0).frozen
    first = FrozenScores(*(getattr(frozen, field.name)[:100] for field in fields(frozen)))
    missing = FrozenScores(*(getattr(frozen, field.name).copy() for field in fields(frozen)))
    for field in fields(missing):
        getattr(missing, field.name)[100:] = np.nan
    expected = fit_closed_form(first, columns[:100], Prior()).weights
    assert fit_closed_form(missing, columns, Prior()).weights == pytest.approx(expected)


def test_without_images_the_closed_form_is_the_prior() -> None:
    nothing = random_evidence(0, COUNTS, n=0).frozen
    rule = fit_closed_form(nothing, np.zeros(0, np.int64), Prior())
    assert rule.weights == {name: Prior().rule[name] for name in FROZEN_TERMS}


def test_networks_that_know_more_pay_and_noise_does_not(columns: NDArray[np.int64]) -> None:
    assert gain_of(networks_know(columns, 4.0), columns).pays(pooled_only=True)
    noise = [gain_of(networks_know(columns, 0.0, seed), columns) for seed in range(4)]  # some noise fits by chance
    assert sum(found.networks - found.closed_form for found in noise) > 0
    assert not all(found.pays(pooled_only=True) for found in noise)
    assert all(found.error > 0 for found in noise)


@pytest.mark.parametrize(
    ("worse_by", "cnn", "transformer"), [(-0.1, True, True), (1.9, False, True), (2.1, False, False)]
)
def test_networks_of_a_transformer_count_unless_they_are_clearly_worse(
    worse_by: float, cnn: bool, transformer: bool
) -> None:
    gain = NetworkGain(closed_form=1.0, networks=1.0 + worse_by * 0.2, error=0.2)
    assert (gain.pays(pooled_only=True), gain.pays(pooled_only=False)) == (cnn, transformer)


def test_a_single_held_out_image_compares_nothing(columns: NDArray[np.int64]) -> None:
    evidence, one = networks_know(columns, 4.0), np.arange(len(columns)) == 0
    rng = np.random.default_rng(0)
    assert network_gain(evidence.rows(one), one, evidence.frozen, columns, Prior(), Rule(), Rule(), rng) is None


def test_a_version_whose_networks_do_not_pay_answers_in_closed_form() -> None:
    learner = tiny_learner(networks="if they pay", epochs=1)
    tasks = class_tasks([2, 2])
    for learned in learn_tasks(learner, tasks):
        gain, rule = learned.verdict.networks, learned.model.rule
        assert gain is not None
        pays = gain.pays(learner.backbone.one_token)
        assert rule.uses_networks == pays
        assert rule.name == ("fitted" if pays else NAME)
    assert not pays  # one epoch: the networks know nothing yet
    assert learned.verdict.to_dict()["networks"] == {**vars(gain)}
    # The networks stay, for the next version to judge; answers do not need their features.
    assert len(learned.model.tasks) == 2
    keys = [key for task in tasks for keys in task.values() for key in keys]
    features = features_of(learner, learned.model, keys)
    without = Features(np.zeros((0, len(keys), 0), np.float32), features.frozen, features.expanded)
    model = learned.model
    assert answer(model, model.evidence(without)) == answer(model, model.evidence(features))
