"""Training the refined feature, and the rule that weighs it."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from models.inference.answer import answer
from models.inference.evidence import RefinedScores
from models.inference.model import Model
from models.inference.rules import FROZEN_TERMS, REFINED, REFINED_TERMS, Rule
from tests.support.evidence import random_evidence
from tests.support.tiny_model import SIZE, class_tasks, features_of, learn_tasks, quiet_progress, refining_learner
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.closed_form import REFINED_NAME, fit_closed_form, fit_refined, network_gain
from trainer.learning.learner import Learner
from trainer.learning.prior import Prior
from trainer.learning.refinement import refined_feature, refines
from trainer.learning.tokens import TokenCache

TASKS = class_tasks([2, 2], images=10)


def accuracy(own: Learner, model: Model, name: str | None = None, images: int = 10) -> float:
    """Of fresh images; of one kind of evidence, or as the version answers."""
    keys = [f"{label}/{number}" for label in model.classes for number in range(100, 100 + images)]
    evidence = model.evidence(features_of(own, model, keys))
    assert evidence.refined is not None
    scores = evidence.refined.cosines if name == REFINED else model.rule.log_scores(evidence)
    return float((scores.argmax(axis=1) == np.repeat(np.arange(len(model.classes)), images)).mean())


def test_a_version_has_a_refined_feature_of_all_classes_and_answers_with_it() -> None:
    own = refining_learner()
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
    own = refining_learner()
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
        own = refining_learner(
            refined_rate=rate, refined_units=16, refined_epochs=40, keep_per_class=40, replay_size=80
        )
        own = replace(own, tokens=TokenCache(own.backbone, either_or, own.settings.seed))
        found[rate] = accuracy(own, learn_tasks(own, class_tasks([2], images=60))[0].model, REFINED, images=100)
    assert found[0.03] > found[1e-9] + 0.1


@pytest.mark.parametrize(("least", "sides"), [(0.5, {1, 2}), (1.0, {2})])
def test_training_sees_square_parts_of_the_maps(least: float, sides: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers see whole maps, of 2 x 2 positions here: fewer are enlarged again, because the tiny tail needs them."""
    own, seen = refining_learner(refined_window=least), set[tuple[bool, int, int]]()
    tail = own.backbone.tail
    assert tail is not None
    forward = tail.forward

    def watched(x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        seen.add((torch.is_grad_enabled(), *x.shape[2:]))
        return forward(torch.nn.functional.interpolate(x, (2, 2)), *tensors)

    monkeypatch.setattr(tail, "forward", watched)
    learn_tasks(own, TASKS)
    assert seen == {(True, side, side) for side in sides} | {(False, 2, 2)}


def test_the_same_seed_gives_the_same_adapters() -> None:
    one, other = (learn_tasks(refining_learner(), TASKS)[-1].model.refined for _ in range(2))
    assert one is not None
    assert other is not None
    assert all(np.array_equal(array, other.tensors()[name]) for name, array in one.tensors().items())


def test_the_work_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    own = refining_learner(refined_passes=8)
    learned = learn_tasks(own, TASKS)[-1]
    progress = quiet_progress(events)
    refined_feature(own.tokens, learned.model, learned.samples, own.settings, progress)
    assert events
    assert len(events) <= 2  # steps of four images


def test_a_class_without_images_leaves_the_frozen_evidence() -> None:
    own = refining_learner()
    learned = learn_tasks(own, TASKS)[-1]
    samples = replace(learned.samples, memory={**learned.samples.memory, "class 0": ()})
    assert refined_feature(own.tokens, learned.model, samples, own.settings, quiet_progress()) is None


@pytest.mark.parametrize("settings", [{"refine": False}, {"keep": "features"}, {"rule": "paper"}])
def test_no_version_is_refined_where_it_must_not_be(settings: dict[str, Any]) -> None:
    own = refining_learner(**settings)
    assert not refines(own.tokens, own.settings)
    if "keep" not in settings:
        assert learn_tasks(own, TASKS)[-1].model.refined is None


def test_a_version_that_cannot_be_refined_drops_the_parents_feature() -> None:
    own = refining_learner()
    first = learn_tasks(own, TASKS[:1])[0]
    plain = replace(own, settings=own.settings.model_copy(update={"keep": "features"}))
    second = plain.learn(first.model, first.samples, TASKS[1], Checkpoint(None), quiet_progress())
    assert second.model.refined is None
    assert not second.model.uses_refined


def test_maps_are_computed_once(tmp_path: Path) -> None:
    own, reads = refining_learner(), list[str]()
    read = own.tokens._read
    own.tokens._read = lambda key: (reads.append(key), read(key))[1]
    keys = TASKS[0]["class 0"]
    first, again = own.tokens.maps(keys), own.tokens.maps(keys)
    assert np.array_equal(first.numpy(), again.numpy())
    assert sorted(reads) == sorted(keys)
