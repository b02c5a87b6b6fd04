"""Tasks are learned without images that an operator has deleted, and deleted images leave no class behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from models.inference.stored_model import model_tensors
from models.versions.store import VersionStore
from tasks.errors import BatchError
from tasks.images import ImageStore, Retention
from tests.support.manifests import manifest_of
from tests.support.tiny_model import (
    TinyImages,
    class_tasks,
    features_of,
    learn_tasks,
    silent_progress,
    tiny_backbone,
    tiny_learner,
    tiny_settings,
)
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import HeldOut, Samples
from trainer.learning.tokens import TokenCache
from trainer.parent import Parent


def test_samples_without_deleted_images_keep_their_classes() -> None:
    samples = Samples(
        {"a": ("1", "2"), "b": ("3",)}, (HeldOut("4", "a"), HeldOut("5", "b")), {"a": ("1", "2", "4"), "b": ("3", "5")}
    )
    left = samples.without_missing({"2", "5"})
    assert left == Samples({"a": ("2",), "b": ()}, (HeldOut("5", "b"),), samples.seen)
    assert samples.without_missing(samples.keys) == samples


def accuracy(learner: Learner, learned: Learned, name: str) -> float:
    """Return the share of unseen images of the class whose best class is right, novel or not."""
    keys = TinyImages().batch([name], count=20, start=500)[name]
    scores = learned.model.rule.log_scores(learned.model.evidence(features_of(learner, learned.model, keys)))
    return float(np.mean([learned.model.classes[best] == name for best in scores.argmax(axis=1)]))


def learn_on(learner: Learner, parent: Learned, samples: Samples, images: dict[str, list[str]]) -> Learned:
    return learner.learn(parent.model, samples, images, Checkpoint(None), silent_progress())


BIG = {"replay_size": 40, "epochs": 8, "back_epochs": 10}


@pytest.mark.parametrize("lost", [["class 0"], ["class 0", "class 1"], ["class 0", "class 1", "class 2", "class 3"]])
def test_a_class_whose_images_are_all_deleted_is_still_recognised_after_the_next_task(lost: list[str]) -> None:
    learner = tiny_learner(**BIG)
    *tasks, last = class_tasks([2, 2, 2], images=20)
    parent = learn_tasks(learner, tasks)[-1]
    before = {name: accuracy(learner, parent, name) for name in lost}
    gone = {key for name in lost for key in parent.samples.seen[name]}
    samples = parent.samples.without_missing(parent.samples.keys - gone)
    assert {name for name, keys in samples.memory.items() if not keys} == set(lost)
    child = learn_on(learner, parent, samples, last)
    for task in child.model.tasks:
        assert np.isfinite(task.head.weight).all()
    assert np.isfinite(child.model.novelty.threshold).all()
    assert np.isfinite(child.model.novelty.weights).all()
    whole = learn_on(learner, parent, parent.samples, last)
    for name in lost:
        assert accuracy(learner, child, name) >= min(before[name], accuracy(learner, whole, name)) - 0.25
    # The class can be extended with new images, and the next task is learned as usual.
    more = TinyImages().batch(lost, start=100)
    again = learn_on(learner, child, child.samples, more)
    assert all(again.samples.memory[name] for name in lost)


def test_a_head_does_not_unlearn_a_class_whose_images_are_all_deleted() -> None:
    learner = tiny_learner(replay_size=40, epochs=8, back_epochs=60, noise=60)
    first, second = class_tasks([2, 2], images=20)
    parent = learn_tasks(learner, [first])[0]
    gone = set(parent.samples.seen["class 0"])
    child = learn_on(learner, parent, parent.samples.without_missing(parent.samples.keys - gone), second)
    keys = TinyImages(60).batch(["class 0"], count=40, start=500)["class 0"]
    shares = []
    for learned in (parent, child):
        head = learned.model.tasks[0].head
        shares.append((head.logits(features_of(learner, learned.model, keys).tasks[0]).argmax(axis=1) == 0).mean())
    assert shares[1] >= shares[0] - 0.1


def test_heads_of_tasks_without_memory_are_still_back_updated() -> None:
    learner = tiny_learner(**BIG)
    first, second = class_tasks([2, 2], images=20)
    parent = learn_tasks(learner, [first])[0]
    child = learn_on(learner, parent, parent.samples.without_missing(()), second)
    old, new = parent.model.tasks[0], child.model.tasks[0]
    assert not np.array_equal(old.head.weight, new.head.weight)
    z = features_of(learner, child.model, [key for keys in second.values() for key in keys]).tasks[0]
    ood = [head.logits(z)[:, -1] - head.logits(z)[:, :-1].max(axis=1) for head in (old.head, new.head)]
    assert ood[1].mean() > ood[0].mean()


def test_a_task_whose_held_out_images_are_all_deleted_has_finite_decisions() -> None:
    learner = tiny_learner()
    first, second = class_tasks([2, 2])
    parent = learn_tasks(learner, [first])[0]
    samples = replace(parent.samples, held_out=())
    child = learn_on(learner, parent, samples, second)
    assert np.isfinite(child.model.novelty.threshold).all()
    assert child.verdict.tasks[0].images == 0
    # A known class extended by one image has no held-out image either: then images that were trained on must do.
    lone = learn_on(learner, parent, samples, {"class 0": ["class 0/900"]})
    assert lone.samples.held_out == ()
    assert np.isfinite(list(lone.model.rule.weights.values())).all()
    assert np.isfinite(lone.model.novelty.threshold).all()


def test_nothing_changes_when_no_image_was_deleted() -> None:
    learner = tiny_learner()
    first, second = class_tasks([2, 1])
    parent = learn_tasks(learner, [first])[0]
    one = learn_on(learner, parent, parent.samples, second)
    other = learn_on(learner, parent, parent.samples.without_missing(parent.samples.keys), second)
    for name, tensor in model_tensors(one.model).items():
        assert np.array_equal(tensor, model_tensors(other.model)[name])


def test_the_next_task_is_learned_without_the_images_that_were_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    backbone, images, store = tiny_backbone(), ImageStore(tmp_path), VersionStore(tmp_path)
    learner = Learner(TokenCache(backbone, images.read), tiny_settings())
    first, second = (
        {name: [images.put(TinyImages().read(key)) for key in keys] for name, keys in task.items()}
        for task in class_tasks([2, 1])
    )
    learned = learner.learn(learner.empty(), Samples(), first, Checkpoint(None), silent_progress())
    store.publish(
        manifest_of(learned.model, backbone.spec, graphs={}), model_tensors(learned.model), learned.samples.to_json()
    )
    assert Parent.load(store).without_deleted(images).samples == learned.samples
    assert caplog.text == ""
    gone = [*learned.samples.memory["class 0"], learned.samples.held_out[-1].key]
    for sha in gone:
        Retention(store).remove(sha, "operator")
    parent = Parent.load(store).without_deleted(images)
    assert parent.model is not None
    assert f"{len(gone)} images of version 1 were deleted" in caplog.text
    assert parent.deleted == tuple(sorted(gone))
    assert not parent.samples.keys & set(gone)
    fresh = Learner(TokenCache(backbone, images.read), tiny_settings())  # has cached no tokens
    child = fresh.learn(parent.model, parent.samples, second, Checkpoint(None), silent_progress())
    assert child.model.classes == ("class 0", "class 1", "class 2")
    assert not child.samples.keys & set(gone)


def test_an_image_that_was_deleted_counts_as_learned() -> None:
    learner = tiny_learner()
    parent = learn_tasks(learner, class_tasks([2]))[0]
    with pytest.raises(BatchError, match="learned already"):
        learn_on(learner, parent, parent.samples.without_missing(()), TinyImages().batch(["class 0"]))
