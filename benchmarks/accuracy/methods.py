"""The methods that train: one learner on a stream of tasks, and every method that shares its training."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.accuracy import without_images
from benchmarks.accuracy.metrics import Floats, Step
from benchmarks.accuracy.streams import Stream
from models.inference.evidence import Evidence, Features
from models.inference.model import Head, Model
from models.inference.novelty import summaries
from models.inference.rotations import ROTATIONS
from models.inference.rules import Rule
from models.network.adapted_blocks import tensors_of
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.forward_passes import turned_view
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import Samples
from trainer.learning.methods import method_of
from trainer.learning.prior import Prior
from trainer.learning.progress import Listener, Progress
from trainer.learning.provisional import ProvisionalModel, provisional_model
from trainer.learning.settings import PAPER, LearnerSettings, Recipe
from trainer.learning.tokens import TokenCache

ABOUT = {
    "ours": "the default: `more` with images",
    "provisional": "ours in the seconds before the last task is learned: its classes, and all others, in closed form",
    "paper": "MORE as published: training, rule, novelty score and memory of 200 images (preset `paper`)",
    "paper-no-coefficient": "ablation: Eq. base_prediction, no distance coefficient",
    "paper-no-back": "ablation: heads as their own task left them",
    "paper-neither": "ablation: neither of the two",
    **without_images.ABOUT,
}
NO_COEFFICIENT = Rule("no coefficient", {"probability": 1.0})


def settings_of(group: str, seed: int, prior: Prior, **given: Any) -> LearnerSettings:
    """The settings of a training group."""
    if group == "ours":
        return LearnerSettings(seed=seed, recipe=Recipe(prior=prior), **given)
    if group in without_images.GROUPS:
        return without_images.settings_of(group, seed, Recipe(prior=prior), **given)
    recipe = PAPER["recipe"]
    if group == "hat":
        recipe = recipe.model_copy(update={"replay": False, "back_update": False})
    return LearnerSettings(preset="paper", seed=seed, recipe=recipe, **given)


@dataclass(frozen=True)
class Learning:
    """A version and the evidence of the test images under it."""

    learned: Learned
    provisional: ProvisionalModel | None  # before it; None with the paper's rule
    evidence: Evidence
    first_heads: Mapping[int, Head]  # as their own task left them
    test: Features
    seconds: float


def learn(
    tokens: TokenCache,
    tasks: Sequence[Mapping[str, Sequence[str]]],
    test_keys: Sequence[str],
    settings: LearnerSettings,
    on_learned: Callable[[Learning], None],
    listener: Listener = lambda event: None,
) -> Model:
    """Learn the tasks one after the other, and pass every version on."""
    learner = Learner(tokens, settings)
    model, samples = learner.empty(), Samples()
    first_heads: dict[int, Head] = {}
    test = Features([], *tokens.frozen(test_keys))
    # The trunk is part of the first task's seconds otherwise, or not if an earlier run stored its tokens.
    tokens.prepare([key for task in tasks for keys in task.values() for key in keys])
    for number, task in enumerate(tasks):
        before = None
        if settings.weighs_frozen_evidence:
            before = provisional_model(tokens, model, samples, {"pending": task}, settings)
        started = time.monotonic()
        progress = Progress(f"{number + 1} of {len(tasks)}", listener)
        learned = learner.learn(model, samples, task, Checkpoint(None), progress)
        seconds = time.monotonic() - started
        model, samples = learned.model, learned.samples
        if learned.new_head is not None:
            first_heads[number] = learned.new_head
        test = _with_task(test, tokens, test_keys, model, settings)
        on_learned(Learning(learned, before, model.evidence(test), dict(first_heads), test, seconds))
    return model


def _with_task(
    test: Features, tokens: TokenCache, keys: Sequence[str], model: Model, settings: LearnerSettings
) -> Features:
    """The features of the test images, with those of the last task."""
    own = tensors_of(model.tasks[-1])
    tasks = [*test.tasks, tokens.features(keys, own)]
    test = replace(test, refined=None if model.refined is None else tokens.refined(keys, model.refined.tail))
    if not method_of(settings).rotates:
        return replace(test, tasks=tasks)
    turned = [tokens.features(keys, own, view=turned_view(0, turns)) for turns in range(1, ROTATIONS)]
    new = np.stack(turned)[:, None]  # (3, 1, n, d)
    return replace(test, tasks=tasks, turned=new if test.turned is None else np.concatenate([test.turned, new], axis=1))


def run(
    group: str,
    tokens: TokenCache,
    stream: Stream,
    settings: LearnerSettings,
    listener: Listener,
    size_of: Callable[[str], int] = lambda key: 0,
) -> tuple[dict[str, list[Step]], dict[str, Any]]:
    """(the steps of every method of the group, facts about the training); `size_of` is that of an image's file."""
    steps: dict[str, list[Step]] = {}
    # The tokens of a transformer have too many dimensions for a covariance.
    drawn = without_images.Drawn(tokens.backbone.spec.dimensions) if tokens.backbone.one_token else None
    last: list[Learned] = []

    def on_learned(learning: Learning) -> None:
        model, samples = learning.learned.model, learning.learned.samples
        if list(model.classes) != stream.classes[: len(model.classes)]:
            raise RuntimeError("the model's classes are not in the order of the stream")
        last[:] = [learning.learned]
        if group in ("hat-csi", "sup-csi"):
            number = len(model.tasks) - 1
            if drawn is not None:
                drawn.add(tokens, stream.tasks[number], np.random.default_rng([settings.seed, number]))
            found = without_images.csi_steps(group, tokens, model, samples, learning.test, drawn, learning.seconds) | {
                f"{group}-product": served(learning)
            }
        elif group == without_images.STATISTICS:
            found = {group: served(learning)}
        elif group in without_images.GROUPS:
            logits = learning.evidence.class_logits
            name = group.split("-")[0]
            found = without_images.plain_steps(name, tokens, model, logits, stream.test_keys, learning.seconds)
        else:
            found = _steps(group, learning)
        for name, step in found.items():
            steps.setdefault(name, []).append(step)

    token_bytes = tokens.get(stream.test_keys[:1])[0].nbytes
    model = learn(tokens, stream.tasks, stream.test_keys, settings, on_learned, listener)
    facts = {
        "rule": model.rule.to_dict(),
        "novelty": {
            "weights": model.novelty.weights.tolist(),
            "logistic": model.novelty.logistic.tolist(),
            "threshold": model.novelty.threshold.tolist(),
        },
        "capacity": model.shared.capacity,
        "bytes": without_images.kept_bytes(model, last[0].samples, size_of, token_bytes),
    }
    return steps, facts


def _steps(group: str, learning: Learning) -> dict[str, Step]:
    model, evidence = learning.learned.model, learning.evidence
    if group == "hat":
        return {"hat": _plain(model, evidence.class_logits, learning.seconds)}
    if group == "ours":
        out = {"ours": served(learning)}
        if (early := learning.provisional) is not None:
            scores = early.model.evidence(learning.test)
            out["provisional"] = answered(early.model, scores, early.accuracy, early.novelty_auc)
        return out
    before = model.with_heads(learning.first_heads).evidence(learning.test)
    scored = {
        "paper-no-coefficient": NO_COEFFICIENT.log_scores(evidence),
        "paper-no-back": model.rule.log_scores(before),
        "paper-neither": NO_COEFFICIENT.log_scores(before),
    }
    return {"paper": served(learning)} | {name: _plain(model, scores) for name, scores in scored.items()}


def _plain(model: Model, scores: Floats, seconds: float | None = None) -> Step:
    """A method without a threshold: its novelty score is that of the best class."""
    return Step(scores, model.task_of_class, scores.max(axis=1), seconds=seconds)


def served(learning: Learning) -> Step:
    """Scores, flags and p_novel of the learned version as the service answers them."""
    verdict = learning.learned.verdict
    return answered(learning.learned.model, learning.evidence, verdict.accuracy, verdict.novelty_auc, learning.seconds)


def answered(
    model: Model, evidence: Evidence, accuracy: float | None, novelty_auc: float | None, seconds: float | None = None
) -> Step:
    """What the service answers with a model; `accuracy` and `novelty_auc` are what its version says of itself."""
    log_scores = model.rule.log_scores(evidence)
    novelty = model.novelty.scores(summaries(evidence, log_scores))
    p_novel = model.novelty.p_novel(novelty)
    flags = p_novel > model.novelty.novel_above
    return Step(log_scores, model.task_of_class, novelty, flags, p_novel, accuracy, novelty_auc, seconds)
