"""Learning one task: Algorithm 1 from a labelled batch to a model that is ready to be judged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from models.inference.calibration import Calibration
from models.inference.evidence import Evidence, Features
from models.inference.gaussians import Gaussians
from models.inference.model import Adapters, Head, Model, TaskModel
from models.inference.rules import Rule
from models.network.adapted_blocks import tensors_of
from models.network.backbone import Backbone
from tasks.errors import BatchError
from trainer.learning.back_update import back_update
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.cross_fit import cross_fit
from trainer.learning.evaluation import held_out_evidence
from trainer.learning.fit import Fitted, TaskData, fit, grow, new_shared, work
from trainer.learning.gate import Verdict, judge
from trainer.learning.memory import HeldOut, Samples, bounded, check_size, merged, remember, split, unseen
from trainer.learning.progress import Progress
from trainer.learning.reproducibility import random_stream
from trainer.learning.rule_fit import fit_rule
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import Tokens

Images = Mapping[str, Sequence[str]]  # class -> image keys


@dataclass(frozen=True)
class Learned:
    """The outcome of a task: the new model, the images it keeps, and what the gate says."""

    model: Model
    samples: Samples
    verdict: Verdict
    fresh_head: Head | None  # the new task's head; None when the batch held known classes only


@dataclass
class Learner:
    """Learns tasks one after the other on one backbone."""

    backbone: Backbone
    tokens: Tokens
    settings: LearnerSettings

    def empty(self) -> Model:
        """A model that has learned nothing."""
        frozen = Gaussians.empty(self.backbone.spec.dimensions)
        return Model(new_shared(self.backbone, self.settings), (), frozen, Rule(), Calibration.empty())

    def learn(
        self, parent: Model, samples: Samples, images: Images, checkpoint: Checkpoint, progress: Progress
    ) -> Learned:
        """Learn the batch on top of the parent, which is not changed."""
        check_size(samples.memory, images, self.settings.replay_size)  # now, not after the training
        fresh_images = unseen(images, samples)
        known, new = (
            {name: keys for name, keys in fresh_images.items() if (name in parent.classes) == is_known}
            for is_known in (True, False)
        )
        lone = [f"class {name!r} is new and has one image: add another" for name, keys in new.items() if len(keys) < 2]
        if lone:
            raise BatchError(lone)
        rng = random_stream(self.settings.seed, "task", len(parent.tasks), *sorted(images))
        self._plan(parent, samples, images, new, progress)
        model, held_out = parent, list(samples.held_out)
        replay = [key for keys in samples.memory.values() for key in keys]
        extension, more = split(known, self.settings.recipe.hold_out, rng) if known else ({}, [])
        # A class extended by a single image learns from it rather than judging by it.
        lonely = {name for name, keys in extension.items() if not keys}
        extension = {name: known[name] if name in lonely else keys for name, keys in extension.items()}
        held_out += [sample for sample in more if sample.label not in lonely]
        model = self._extend(model, extension)
        replay += [key for keys in extension.values() for key in keys]
        fresh: dict[str, list[str]] = {}
        fresh_head = None
        if new:
            fresh, more, model = self._new_task(model, new, replay, rng, checkpoint, progress)
            held_out += more
            fresh_head = model.tasks[-1].head
        if self.settings.recipe.back_update:
            model = self._back_update(parent, model, samples, extension, fresh, rng, progress)
        memory = remember(samples.memory, {**extension, **fresh}, self.settings.replay_size, rng)
        kept = Samples(memory, bounded(held_out, rng), merged(samples.seen, fresh_images))
        model, verdict = self._calibrate(parent, model, kept, progress)
        return Learned(model, kept, verdict, fresh_head)

    def _plan(self, parent: Model, samples: Samples, images: Images, new: Images, progress: Progress) -> None:
        """Announce the work ahead, in images, and do the part that everything else waits for: the trunk."""
        keys = [key for names in images.values() for key in names]
        replay = [key for names in samples.memory.values() for key in names]
        everything = sorted(samples.keys | set(keys))
        passes = len(parent.tasks) + 1  # back-updating and evaluating look at about everything through every task
        trained_on = sorted({*keys, *replay})
        total = len(everything) + (self.settings.views - 1) * len(trained_on)
        progress.plan(total + len(everything) * passes)
        if new:
            arriving = [key for names in new.values() for key in names]
            data = TaskData(arriving, [], len(new), replay if self.settings.recipe.replay else [])
            progress.plan(work(data, self.settings))
            if self._cross_fits(new):
                folds = self.settings.folds
                part = data._replace(keys=arriving[: len(arriving) * (folds - 1) // folds])
                progress.plan(folds * work(part, self.settings))
        seen = 0

        def done(n: int) -> None:
            nonlocal seen
            seen += n
            progress.report("reading", seen, total, n)

        self.tokens.prepare(everything, done=done)
        self.tokens.prepare(trained_on, self.settings.views, done)

    def _cross_fits(self, new: Images) -> bool:
        return bool(new) and min(len(keys) for keys in new.values()) < self.settings.hold_out_from

    def _new_task(
        self,
        parent: Model,
        new: Images,
        replay: list[str],
        rng: np.random.Generator,
        checkpoint: Checkpoint,
        progress: Progress,
    ) -> tuple[dict[str, list[str]], list[HeldOut], Model]:
        """Train the new task's network, head and statistics; (images trained on, held out, model with the task)."""
        shared = grow(parent.shared, self.settings)
        crossing = self._cross_fits(new)
        train, held_out = (
            ({n: list(k) for n, k in new.items()}, []) if crossing else split(new, self.settings.recipe.hold_out, rng)
        )
        classes = tuple(new)
        keys = [key for name in classes for key in train[name]]
        labels = np.repeat(np.arange(len(classes)), [len(train[name]) for name in classes]).astype(np.int64)
        data = TaskData(keys, labels.tolist(), len(classes), replay if self.settings.recipe.replay else [])

        name = f"task {len(parent.tasks) + 1}"

        def run(part: TaskData, phase: str) -> Fitted:
            return fit(self.tokens, self.backbone, shared, part, self.settings, name, phase, checkpoint, progress)

        def assemble(part: TaskData, fitted: Fitted) -> Model:
            return self._with_task(parent, classes, part, fitted)

        model = assemble(data, run(data, name))
        if crossing:
            held_out = cross_fit(self, model, classes, data, run, assemble, name, rng)
        return train, held_out, model

    def _with_task(self, parent: Model, classes: tuple[str, ...], data: TaskData, fitted: Fitted) -> Model:
        """The parent and one more task, with its statistics (Algorithm 1, last line)."""
        labels = np.asarray(data.labels)
        z = self.tokens.features(data.keys, fitted.tensors)
        frozen = self.tokens.features(data.keys, self.backbone.frozen_task())
        parts = [tensor.numpy() for tensor in fitted.tensors]
        task = TaskModel(
            classes=classes,
            adapters=Adapters(*parts[:4]),
            norm_w=parts[4],
            norm_b=parts[5],
            head=fitted.head,
            gaussians=Gaussians.fit(z, labels, data.classes),
        )
        return replace(
            parent,
            shared=fitted.shared,
            tasks=(*parent.tasks, task),
            frozen=parent.frozen.with_classes(frozen, labels, data.classes),
        )

    def features(self, model: Model, keys: Sequence[str]) -> Features:
        """Every task's feature and the frozen one."""
        tasks = [self.tokens.features(keys, tensors_of(task)) for task in model.tasks]
        return Features(tasks, self.tokens.features(keys, self.backbone.frozen_task()))

    def _extend(self, model: Model, extension: Images) -> Model:
        """More images of known classes: their statistics, not their networks, take them in."""
        for k, task in enumerate(model.tasks):
            keys = [key for name in task.classes for key in extension.get(name, ())]
            if not keys:
                continue
            labels = np.array([c for c, name in enumerate(task.classes) for _ in extension.get(name, ())])
            z = self.tokens.features(keys, tensors_of(task))
            frozen = self.tokens.features(keys, self.backbone.frozen_task())
            offset = int(np.searchsorted(model.task_of_class, k))
            grown = replace(task, gaussians=task.gaussians.with_samples(z, labels))
            tasks = tuple(grown if i == k else other for i, other in enumerate(model.tasks))
            model = replace(model, tasks=tasks, frozen=model.frozen.with_samples(frozen, labels + offset))
        return model

    def _back_update(
        self,
        parent: Model,
        model: Model,
        samples: Samples,
        extension: Images,
        fresh: Images,
        rng: np.random.Generator,
        progress: Progress,
    ) -> Model:
        """Every earlier head after a new task; after known classes only, the heads that they belong to."""
        arrived = [key for keys in fresh.values() for key in keys]
        memory: Images = merged(samples.memory, extension)
        quota = max(1, self.settings.replay_size // max(1, len(memory)))
        size = sum(len(keys) or quota for keys in memory.values())
        chosen = [arrived[i] for i in rng.permutation(len(arrived))[:size]]
        heads: dict[int, Head] = {}
        for j, task in enumerate(parent.tasks):
            own = [(key, c) for c, name in enumerate(task.classes) for key in memory.get(name, ())]
            others = [key for name, keys in memory.items() if name not in task.classes for key in keys] + chosen
            if not fresh and not any(name in extension for name in task.classes):
                continue
            tensors, now = tensors_of(task), model.tasks[j]
            mine = self.tokens.features([key for key, _ in own], tensors)
            theirs = self.tokens.features(others, tensors)
            labels = np.array([c for _, c in own], np.int64)
            # A class whose images were all deleted would be unlearned by a head that meets only its siblings: its
            # statistics, fitted on all the images that it ever had, stand for it.
            lost = np.setdiff1d(np.arange(len(task.classes)), labels).repeat(quota)
            if len(lost):
                mine = np.concatenate([mine, now.gaussians.sample(lost, rng).astype(np.float32)])
                labels = np.concatenate([labels, lost])
            heads[j] = back_update(now.head, now.gaussians, mine, labels, theirs, self.settings, rng)
            progress.report("back-updating", j + 1, len(parent.tasks), len(own) + len(others))
        return model.with_heads(heads)

    def _calibrate(self, parent: Model, model: Model, samples: Samples, progress: Progress) -> tuple[Model, Verdict]:
        """The rule's constants, the threshold and the gate, on all held-out images of all tasks."""
        keys = [sample.key for sample in samples.held_out]
        labels = [sample.label for sample in samples.held_out]
        features = self.features(model, keys)
        after = held_out_evidence(model, features, samples.held_out)
        if keys:  # else all of them were deleted, and the parent's constants are the best there are
            column = {name: c for c, name in enumerate(model.classes)}
            columns = np.array([column[label] for label in labels])
            model = replace(model, rule=fit_rule(self.settings.rule, after, columns))
            model = replace(model, calibration=self._calibration(parent, model, after, labels))
        before = None
        if parent.tasks:
            seen = Features(features.tasks[: len(parent.tasks)], features.frozen)
            before = held_out_evidence(parent, seen, samples.held_out)
        verdict = judge(parent if parent.tasks else None, model, before, after, labels, self.settings)
        progress.report("evaluating", 1, 1, len(keys) * len(model.tasks))
        return model, verdict

    def _calibration(self, parent: Model, model: Model, evidence: Evidence, labels: Sequence[str]) -> Calibration:
        """From held-out images; a task whose own were all deleted keeps what its parent measured of its distances."""
        nearest: list[NDArray[np.float64]] = [
            evidence.distances[k][np.array([label in task.classes for label in labels])].min(axis=1)
            for k, task in enumerate(model.tasks)
        ]
        lost = [k for k, distances in enumerate(nearest) if len(distances) == 0]
        known = [distances if len(distances) else np.ones(1) for distances in nearest]
        calibration = Calibration.fit(model.rule.log_scores(evidence).max(axis=1), known, self.settings.accept)
        calibration.tails[lost] = parent.calibration.tails[lost]
        return calibration
