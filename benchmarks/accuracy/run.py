"""Train one learner on a stream of tasks, and score every method that shares its training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from benchmarks.accuracy.data import ImageSet, Stream
from benchmarks.accuracy.metrics import Result, Step, measure
from models.inference.evidence import Features
from models.inference.model import Head, Model
from models.network.adapted_blocks import tensors_of
from models.network.backbone import Backbone
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.progress import Event, Progress
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


class Method(NamedTuple):
    """The rule, heads and training that a method scores with."""

    rule: str
    back_updated: bool = True
    replay: bool = True
    about: str = ""


METHODS = {
    "more": Method("paper", about="coefficient and back-updating (rule `paper`, its temperature fitted)"),
    "more-product": Method("product", about="the paper's score times the frozen likelihood (rule `product`)"),
    "more-no-coefficient": Method("plain", about="ablation: Eq. base_prediction, no distance coefficient"),
    "more-no-back": Method("paper", back_updated=False, about="ablation: heads as their own task left them"),
    "more-neither": Method("plain", back_updated=False, about="ablation: neither of the two"),
    "slda": Method("frozen", about="frozen backbone, class means, one shared covariance"),
    "hat": Method("logits", back_updated=False, replay=False, about="HAT alone: no replay, concatenated logits"),
}


def run(
    backbone: Backbone,
    images: ImageSet,
    stream: Stream,
    settings: LearnerSettings,
    methods: list[str],
    listener: Callable[[Event], None],
) -> tuple[dict[str, Result], dict[str, object]]:
    """Train with and without replay, as the methods need; return (metrics, facts about the run)."""
    results: dict[str, Result] = {}
    facts: dict[str, object] = {}
    for replay in (True, False):
        chosen = {name: METHODS[name] for name in methods if METHODS[name].replay == replay}
        if not chosen:
            continue
        recipe = settings.recipe.model_copy(update={"replay": replay, "back_update": replay})
        own = settings.model_copy(update={"recipe": recipe})
        started = time.monotonic()
        steps, capacity = _train(backbone, images, stream, own, chosen, listener)
        order = {name: c for c, name in enumerate(n for task in stream.tasks for n in sorted(task))}
        labels = np.array([order[name] for name in stream.test_labels], np.int64)
        results |= {name: measure(of_method, labels) for name, of_method in steps.items()}
        which = "replay" if replay else "no_replay"
        facts[f"{which}_seconds"] = round(time.monotonic() - started, 1)
        facts[f"{which}_capacity_used"] = capacity
    return {name: results[name] for name in methods}, facts


def _train(
    backbone: Backbone,
    images: ImageSet,
    stream: Stream,
    settings: LearnerSettings,
    methods: dict[str, Method],
    listener: Callable[[Event], None],
) -> tuple[dict[str, list[Step]], list[dict[str, float]]]:
    tokens = TokenCache(backbone, images.read, settings.seed)
    test = TokenCache(backbone, images.read)
    learner = Learner(tokens, settings)
    model, samples = learner.empty(), Samples()
    first_heads: dict[int, Head] = {}
    features = Features([], *test.frozen(stream.test_keys))
    steps: dict[str, list[Step]] = {name: [] for name in methods}
    capacity = []
    for number, task in enumerate(stream.tasks, 1):
        progress = Progress(f"{number} of {len(stream.tasks)}", listener)
        learned = learner.learn(model, samples, task, Checkpoint(None), progress)
        model, samples = learned.model, learned.samples
        if learned.new_head is not None:
            first_heads[number - 1] = learned.new_head
        z = test.features(stream.test_keys, tensors_of(model.tasks[-1]))
        features = replace(features, tasks=[*features.tasks, z])
        capacity.append(model.shared.capacity)
        held_out = learner.features(model, [sample.key for sample in samples.held_out])
        for name, method in methods.items():
            steps[name].append(_score(model, first_heads, features, held_out, samples, method))
    return steps, capacity


def _score(
    model: Model, first_heads: dict[int, Head], features: Features, held_out: Features, samples: Samples, method: Method
) -> Step:
    """Score the test images."""
    if not method.back_updated:
        model = model.with_heads(first_heads)
    return Step(model.rule.log_scores(model.evidence(features)), model.task_of_class)
