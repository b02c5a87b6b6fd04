from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from models.inference.answer import answer
from models.inference.evidence import FrozenScores, RefinedScores
from models.inference.model import Model
from models.inference.novelty import FROZEN_SUMMARIES, summaries
from models.inference.rules import FROZEN_TERMS, REFINED, REFINED_TERMS, Rule
from tests.support.evidence import random_evidence
from tests.support.tiny_model import SIZE, class_tasks, features_of, learn_tasks, tiny_learner
from trainer.learning import refined_statistics
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.closed_form import REFINED_NAME, fit_closed_form, fit_refined, network_gain
from trainer.learning.forward_passes import ForwardPasses
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.novelty_fit import LEAST_HELD_OUT, Target, fit_novelty, with_refined
from trainer.learning.prior import Prior
from trainer.learning.progress import Progress
from trainer.learning.refined_statistics import RefinedStatistics, left_out_refined
from trainer.learning.refinement import refined_feature, refines
from trainer.learning.tokens import TokenCache

TASKS = class_tasks([2, 2], images=10)


def learner(**settings: Any) -> Learner:
    return tiny_learner(cnn=True, tail=True, **settings)


def accuracy(own: Learner, model: Model, name: str | None = None, images: int = 10) -> float:
    """Of fresh images; of one kind of evidence, or as the version answers."""
    keys = [f"{label}/{number}" for label in model.classes for number in range(100, 100 + images)]
    evidence = model.evidence(features_of(own, model, keys))
    assert evidence.refined is not None
    scores = evidence.refined.cosines if name == REFINED else model.rule.log_scores(evidence)
    return float((scores.argmax(axis=1) == np.repeat(np.arange(len(model.classes)), images)).mean())


def own_progress(events: list[str] | None = None) -> Any:
    return Progress("task", lambda event: None if events is None else events.append(event.phase))


def test_a_version_has_a_refined_feature_of_all_classes_and_answers_with_it() -> None:
    own = learner()
    first, second = learn_tasks(own, TASKS)
    for learned, classes in ((first, 2), (second, 4)):
        refined = learned.model.refined
        assert refined is not None
        assert len(refined.means) == classes
        assert learned.model.uses_refined
        assert learned.model.rule.name == REFINED_NAME
        assert {*learned.model.rule.weights} == {*REFINED_TERMS}
        assert learned.model.rule.weights[REFINED] > 0
    assert accuracy(own, second.model, REFINED) > 0.9
    assert accuracy(own, second.model) > 0.9


def test_a_refined_version_answers_without_the_networks_of_its_tasks() -> None:
    """So its cost does not depend on their number. They stay in it."""
    own = learner()
    model = learn_tasks(own, TASKS)[-1].model
    keys = [f"{name}/{number}" for name in model.classes for number in range(100, 104)]
    features = features_of(own, model, keys)
    without = replace(features, tasks=np.zeros((0, len(keys), 0), np.float32))
    assert len(model.tasks) == 2
    assert not model.rule.uses_networks
    assert answer(model, model.evidence(without)) == answer(model, model.evidence(features))
    frozen_only = Rule("frozen", {name: model.rule.weights[name] for name in FROZEN_TERMS})
    evidence = model.evidence(features)
    assert not np.allclose(model.rule.log_scores(evidence), frozen_only.log_scores(evidence))


def test_the_refined_rule_weighs_the_refined_feature_as_far_as_it_knows_the_class() -> None:
    columns = np.random.default_rng(1).integers(0, 6, 240)
    evidence, everything = random_evidence(0, [3, 3], 240), np.ones(240, bool)
    weights, gains = [], []
    for strength in (0.0, 1.0):
        cosines = np.random.default_rng(2).uniform(-1, 1, (240, 6)) + strength * np.eye(6)[columns]
        known = replace(evidence, refined=RefinedScores(cosines, np.ones((240, 6))))
        rules = fit_closed_form(known.frozen, columns, Prior()), fit_refined(known, columns, Prior())
        weights.append(rules[1].weights[REFINED])
        gain = network_gain(known, everything, known.frozen, columns, Prior(), *rules, np.random.default_rng(0))
        assert gain is not None
        gains.append(gain)
    assert weights[1] > 2 * weights[0]
    assert gains[1].pays(pooled_only=False)
    assert gains[1].networks < gains[1].closed_form - 2 * gains[1].error
    assert gains[0].networks > gains[0].closed_form


def test_without_held_out_images_the_refined_rule_is_the_prior() -> None:
    evidence = replace(random_evidence(0, [3], n=0), refined=RefinedScores(np.zeros((0, 3)), np.zeros((0, 3))))
    assert fit_refined(evidence, np.zeros(0, np.int64), Prior()).weights == Prior().refined_rule


def either_or(key: str) -> bytes:
    """An image with as much red as green, or with one of them only: no linear function of the colours tells which."""
    name, number = key.rsplit("/", 1)
    rng = np.random.default_rng([int(number), name == "class 1"])
    red = bool(rng.integers(2))
    colour = np.array([red, red if name == "class 0" else not red, rng.random()]) * 120 + 60
    pixels = np.clip(colour + rng.normal(0, 40, (SIZE, SIZE, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def test_training_separates_classes_that_the_frozen_feature_confuses() -> None:
    found = {}
    for rate in (0.03, 1e-9):  # the second one leaves the adapters as they start, which add nothing
        own = learner(refined_rate=rate, refined_units=16, refined_epochs=40, keep_per_class=40)
        own = replace(own, tokens=TokenCache(own.backbone, either_or, own.settings.seed))
        found[rate] = accuracy(own, learn_tasks(own, class_tasks([2], images=60))[0].model, REFINED, images=100)
    assert found[0.03] > found[1e-9] + 0.1


def test_held_out_images_are_in_the_statistics_but_no_adapter_is_trained_on_them() -> None:
    own = learner()
    learned = learn_tasks(own, TASKS)[-1]
    assert learned.samples.held_out
    without = replace(learned.samples, held_out=())
    found = [
        refined_feature(own.tokens, learned.model, s, own.settings, own_progress()) for s in (learned.samples, without)
    ]
    one, other = found
    assert one is not None
    assert other is not None
    assert all(np.array_equal(array, other.tail[name]) for name, array in one.tail.items())
    assert not np.allclose(one.means, other.means)


def alone(features: Any, columns: Any) -> Any:
    """In place of likeness groups: no image is a near-duplicate of another; generated ones are."""
    return np.arange(len(columns))


def left_out(own: Learner, model: Model, samples: Samples, keys: Sequence[str]) -> RefinedScores:
    found = left_out_refined(own.tokens, model, samples, keys, own.settings, np.random.default_rng(0))
    assert found is not None
    return found


def test_a_held_out_image_is_scored_without_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refined_statistics, "likeness_groups", alone)
    own = learner()
    learned = learn_tasks(own, class_tasks([3, 2], images=20))[-1]
    model, samples = learned.model, learned.samples
    assert model.refined is not None
    keys = [sample.key for sample in samples.held_out]
    columns = np.array([model.classes.index(sample.label) for sample in samples.held_out])
    itself = np.arange(len(keys)), columns
    scores = left_out(own, model, samples, keys)
    plain = model.refined.scores(own.tokens.refined(keys, model.refined.tail))
    assert (scores.distances[itself] > plain.distances[itself]).all()
    # As if the image had never been kept, but for the amount of the identity in the covariance.
    for place, sample in enumerate(samples.held_out[:4]):
        fewer = replace(samples, held_out=tuple(other for other in samples.held_out if other != sample))
        exact = left_out(own, model, fewer, [sample.key])
        np.testing.assert_allclose(scores.distances[place], exact.distances[0], rtol=0.1)
        np.testing.assert_allclose(scores.cosines[place], exact.cosines[0], atol=0.1)


def test_a_held_out_image_is_scored_without_its_near_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if they are not asked for."""
    own = learner(keep_per_class=20)
    learned = learn_tasks(own, class_tasks([3, 2], images=20))[-1]
    samples, one = learned.samples, learned.samples.held_out[-1]
    same_class = np.array([sample.label == one.label for sample in samples.held_out])
    assert same_class.sum() > 1
    column = learned.model.classes.index(one.label)

    def distance(groups: NDArray[np.int64]) -> float:
        """Of the image to its class, with these likeness groups of the held-out images."""
        monkeypatch.setattr(refined_statistics, "likeness_groups", lambda features, columns: groups)
        return float(left_out(own, learned.model, samples, [one.key]).distances[0, column])

    every = np.arange(len(samples.held_out))
    assert distance(np.where(same_class, 0, 1 + every)) > distance(every)


def test_the_only_held_out_image_of_a_class_can_be_left_out() -> None:
    own = learner()
    learned = learn_tasks(own, class_tasks([2], images=5))[-1]
    one_of_each = {sample.label: sample for sample in learned.samples.held_out}
    keys = [sample.key for sample in one_of_each.values()]
    samples = replace(learned.samples, held_out=tuple(one_of_each.values()))
    assert len(keys) == 2
    scores = left_out(own, learned.model, samples, keys)
    assert np.isfinite(scores.cosines).all()
    plain = learned.model.refined
    assert plain is not None
    assert not np.allclose(scores.cosines, plain.scores(own.tokens.refined(keys, plain.tail)).cosines)


def test_a_parent_whose_images_are_gone_is_compared_without_its_refined_feature() -> None:
    own = learner()
    first = learn_tasks(own, TASKS[:1])[0]
    assert first.model.uses_refined
    plain = replace(own, settings=own.settings.model_copy(update={"keep": "features"}))
    own.tokens.refined = not_called  # type: ignore[method-assign]
    second = plain.learn(first.model, first.samples, TASKS[1], Checkpoint(None), own_progress())
    assert second.verdict.tasks[0].accuracy_before is not None


def not_called(*arguments: Any) -> Any:
    raise AssertionError("an image is passed through the tail")


def test_a_trainer_that_was_started_again_passes_the_parents_images_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every later task only those that are new to it."""
    own = learner()
    tasks = class_tasks([2, 2, 2, 2], images=10)
    before = learn_tasks(own, tasks[:1])[0]
    again = learner()
    passed: list[list[int]] = []
    compute = ForwardPasses.refined_features

    def recorded(self: ForwardPasses, maps: Any, tail: Any) -> Any:
        passed[-1].append(len(maps))
        return compute(self, maps, tail)

    monkeypatch.setattr(ForwardPasses, "refined_features", recorded)
    for number, task in enumerate(tasks[1:]):
        passed.append([])
        learned = again.learn(before.model, before.samples, task, Checkpoint(None), own_progress())
        # The images of the version, and under its parent the new ones of the gate; after the start also the parent's.
        new = sum(sample.label in task for sample in learned.samples.held_out)
        parents = 0 if number else len(before.samples.learned_keys)
        assert sum(passed[-1]) == len(learned.samples.learned_keys) + new + parents
        before = learned


def test_outputs_of_the_tail_are_forgotten_with_their_image() -> None:
    own = learner()
    learned = learn_tasks(own, TASKS[:1])[0]
    assert learned.model.refined is not None
    tail, keys = learned.model.refined.tail, list(TASKS[0]["class 0"])
    first = own.tokens.refined(keys, tail)
    own.tokens.keep_only(keys[1:])
    assert all(keys[0] not in rows for rows in own.tokens._refined.values())
    np.testing.assert_allclose(own.tokens.refined(keys, tail), first, rtol=1e-5)


def test_with_many_classes_held_out_images_come_first_in_the_statistics() -> None:
    own = learner(refined_images=8)
    learned = learn_tasks(own, TASKS)[-1]
    assert learned.model.refined is not None
    given = own.tokens, learned.model.refined.tail, learned.model.classes, learned.samples, own.settings
    found = RefinedStatistics.of(*given)
    assert found is not None
    assert len(found.columns) == 8
    assert np.bincount(list(found.columns.values())).tolist() == [2, 2, 2, 2]
    held_out = {sample.key for sample in learned.samples.held_out}
    assert len(held_out & {*found.columns}) == 4  # beside one image of each class that the adapters were trained on


def test_the_same_seed_gives_the_same_adapters() -> None:
    one, other = (learn_tasks(learner(), TASKS)[-1].model.refined for _ in range(2))
    assert one is not None
    assert other is not None
    assert all(np.array_equal(array, other.tensors()[name]) for name, array in one.tensors().items())


def test_the_work_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    own = learner(refined_passes=8)
    learned = learn_tasks(own, TASKS)[-1]
    progress = own_progress(events)
    refined_feature(own.tokens, learned.model, learned.samples, own.settings, progress)
    assert events
    assert len(events) <= 2  # steps of four images


def test_a_class_without_images_leaves_the_frozen_evidence() -> None:
    own = learner()
    learned = learn_tasks(own, TASKS)[-1]
    samples = replace(learned.samples, memory={**learned.samples.memory, "class 0": ()})
    assert refined_feature(own.tokens, learned.model, samples, own.settings, own_progress()) is None


@pytest.mark.parametrize("settings", [{"refine": False}, {"keep": "features"}, {"rule": "paper"}])
def test_no_version_is_refined_where_it_must_not_be(settings: dict[str, Any]) -> None:
    own = learner(**settings)
    assert not refines(own.tokens, own.settings)
    if "keep" not in settings:
        assert learn_tasks(own, TASKS)[-1].model.refined is None


def test_a_version_that_cannot_be_refined_drops_the_parents_feature() -> None:
    own = learner()
    first = learn_tasks(own, TASKS[:1])[0]
    plain = replace(own, settings=own.settings.model_copy(update={"keep": "features"}))
    second = plain.learn(first.model, first.samples, TASKS[1], Checkpoint(None), own_progress())
    assert second.model.refined is None
    assert not second.model.uses_refined


def test_the_threshold_with_the_refined_feature_accepts_the_asked_share_of_held_out_images() -> None:
    rng = np.random.default_rng(0)
    own = learner()
    model = learn_tasks(own, class_tasks([5], images=20))[0].model
    keys = [f"{name}/{number}" for name in model.classes for number in range(100, 140)]
    evidence = model.evidence(features_of(own, model, keys))
    assert evidence.refined is not None
    simulations = [(rng.normal(0, 1, (50, 7)), rng.normal(-2, 1, (50, 7)))]
    plain = fit_novelty(evidence.frozen, simulations, Prior(), Target())
    weights, target = np.ones(len(keys)), Target(accept=0.9)
    held_out = np.arange(len(keys)) % 5 == 0
    scores = evidence.refined.rows(held_out)
    found = with_refined(plain, evidence.frozen, held_out, scores, simulations, Prior(), target, weights)
    assert found.uses_refined
    assert not plain.uses_refined
    assert np.flatnonzero(found.weights[len(FROZEN_SUMMARIES) : -1]).size == 2
    # The threshold was set without the refined scores of four fifths of these images.
    inputs = summaries(evidence, model.rule.log_scores(evidence))
    assert np.mean(found.scores(inputs)[~held_out] < found.threshold[0]) == pytest.approx(0.1, abs=0.05)
    assert np.mean(found.known < found.threshold[0]) == pytest.approx(0.1, abs=0.01)
    assert np.median(found.simulated) < np.median(found.known)
    few = np.cumsum(held_out) * held_out
    few = (few > 0) & (few < LEAST_HELD_OUT)
    assert with_refined(plain, evidence.frozen, few, scores, simulations, Prior(), target, weights) is plain


@pytest.fixture
def scored() -> tuple[FrozenScores, RefinedScores]:
    """Scores of 240 images for 12 classes."""
    rng = np.random.default_rng(0)
    refined = RefinedScores(rng.uniform(-1, 1, (240, 12)), rng.uniform(0.5, 10, (240, 12)))
    return random_evidence(0, [12], 240).frozen, refined


def test_images_that_cannot_be_left_out_do_not_count(scored: tuple[FrozenScores, RefinedScores]) -> None:
    frozen, refined = scored
    held_out = np.arange(240) < 60
    plain = fit_novelty(frozen, [], Prior(), Target())
    given = refined.rows(held_out), [], Prior(), Target()
    missing = FrozenScores(*(getattr(frozen, field.name).copy() for field in fields(frozen)))
    for field in fields(missing):
        getattr(missing, field.name)[200:] = np.nan
    found = with_refined(plain, missing, held_out, *given, np.ones(240))
    fewer = np.arange(240) < 200
    np.testing.assert_array_equal(
        found.threshold, with_refined(plain, frozen.rows(fewer), held_out[:200], *given, np.ones(200)).threshold
    )
    assert len(found.known) == 200  # of images, however many scores each has
    assert len(found.simulated) == 0
    assert found.logistic.tolist() == [1.0, Prior().refined_novelty["known"]]  # without simulated novelty, the prior's


def test_the_threshold_of_the_refined_feature_flags_the_asked_share(
    scored: tuple[FrozenScores, RefinedScores],
) -> None:
    frozen, refined = scored
    rng, everything = np.random.default_rng(1), np.ones(240, bool)
    simulations = [(rng.normal(0, 1, (200, 7)), rng.normal(-2, 1, (200, 7)))]
    plain = fit_novelty(frozen, simulations, Prior(), Target())
    given = everything, refined, simulations, Prior(), Target(flag=0.8)
    found = with_refined(plain, frozen, *given, np.ones(240))
    assert np.mean(found.simulated < found.threshold[0]) == pytest.approx(0.8, abs=0.02)


def test_near_duplicates_are_not_held_out_images_enough(scored: tuple[FrozenScores, RefinedScores]) -> None:
    frozen, refined = scored
    held_out = np.arange(240) < 2 * LEAST_HELD_OUT
    plain = fit_novelty(frozen, [], Prior(), Target())
    given = plain, frozen, held_out, refined.rows(held_out), [], Prior(), Target()
    assert with_refined(*given, np.where(held_out, 0.4, 1.0)) is plain
    assert with_refined(*given, np.where(held_out, 0.6, 1.0)) is not plain


def test_the_probability_of_being_novel_follows_simulated_novelty(scored: tuple[FrozenScores, RefinedScores]) -> None:
    """Novel images that look far from all classes give a decision that is sure of known ones; near ones do not."""
    frozen, refined = scored
    rng, everything, weights = np.random.default_rng(1), np.ones(240, bool), np.ones(240)
    p_novel = []
    for shift in (-1.0, -6.0):
        simulations = [(rng.normal(0, 1, (200, 7)), rng.normal(shift, 1, (200, 7)))]
        plain = fit_novelty(frozen, simulations, Prior(), Target())
        found = with_refined(plain, frozen, everything, refined, simulations, Prior(), Target(), weights)
        p_novel.append(float(found.p_novel(np.array([np.median(found.known)]))[0]))
    assert p_novel[1] < p_novel[0] / 2


def test_maps_are_computed_once(tmp_path: Path) -> None:
    own, reads = learner(), list[str]()
    read = own.tokens._read
    own.tokens._read = lambda key: (reads.append(key), read(key))[1]
    keys = TASKS[0]["class 0"]
    first, again = own.tokens.maps(keys), own.tokens.maps(keys)
    assert np.array_equal(first.numpy(), again.numpy())
    assert sorted(reads) == sorted(keys)
