"""Learn one task, by Algorithm 1 of MORE or without replay: from a labelled batch to a model that the gate judged."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from models.inference.factors import TaskSums
from models.inference.frozen import FrozenStatistics
from models.inference.gaussians import Gaussians
from models.inference.model import Head, Model, TaskModel
from models.inference.novelty import Novelty
from models.inference.rules import Rule
from models.inference.shared_adapters import Adapters, AdapterUpdate, SharedAdapters
from models.network.adapted_blocks import tensors_of
from models.network.backbone import Backbone
from models.versions.edits import label_of
from tasks.errors import BatchError
from trainer.learning.back_update import BackUpdate, heads_to_update, update_heads
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.division import divide
from trainer.learning.draws import check_summed_batch, with_draws
from trainer.learning.evaluation import evaluate
from trainer.learning.gate import Verdict
from trainer.learning.memory import Samples, check_size, corrections, merged, spread_over_classes, unseen
from trainer.learning.methods import Method, TaskData, method_of
from trainer.learning.progress import Progress
from trainer.learning.refinement import image_passes as refining_passes
from trainer.learning.refinement import refined_feature, refines
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache
from trainer.learning.train_task import image_passes, train_task

Images = Mapping[str, Sequence[str]]  # class -> image keys


@dataclass(frozen=True)
class Learned:
    model: Model
    samples: Samples
    verdict: Verdict
    new_head: Head | None  # of the new task; None if the batch holds known classes only


@dataclass
class Learner:
    """Learns one task after another on one backbone."""

    tokens: TokenCache
    settings: LearnerSettings

    @property
    def backbone(self) -> Backbone:
        return self.tokens.backbone

    @property
    def method(self) -> Method:
        return method_of(self.settings)

    def empty(self) -> Model:
        """A model without tasks."""
        spec = self.backbone.spec
        frozen = FrozenStatistics.empty(spec.frozen.size, spec.frozen.expanded, spec.frozen.output_size)
        shared = self.method.initial(self.backbone.adapters, spec.dimensions, self.settings)
        return Model(shared, (), frozen, Rule(), Novelty.empty())

    def learn(
        self, parent: Model, samples: Samples, images: Images, checkpoint: Checkpoint, progress: Progress
    ) -> Learned:
        """Learn the batch on top of the parent, which is not changed.

        New classes become a new task. Images of known classes extend the statistics and the heads of their tasks. An
        image that was learned under another label loses that label.
        """
        check_size(samples.memory, images, self.settings.replay_size)
        corrected = corrections(images, samples)
        samples = samples.without(corrected)
        unseen_images = unseen(images, samples)
        if self.settings.draws:
            check_summed_batch(unseen_images, corrected, samples)
        known = {name: keys for name, keys in unseen_images.items() if name in parent.classes}
        new = {name: keys for name, keys in unseen_images.items() if name not in parent.classes}
        if new and not parent.tasks and max(len(keys) for keys in new.values()) == 1:
            raise BatchError(["nothing is learned yet, and no class has two images: add images, to calibrate on"])
        rng = random_stream(self.settings.seed, "task", len(parent.tasks), *sorted(images))
        self._prepare_tokens(parent, samples, images, new, progress)
        parent = self._without(parent, corrected)
        if self.settings.draws:
            samples = with_draws(self.tokens, parent, samples, _keys(images), self.settings)
        trained, kept = divide(self.tokens, samples, unseen_images, self.settings)
        extension, trained = ({name: trained[name] for name in part} for part in (known, new))

        # Images of known classes
        model = self._extend(parent, extension)
        # Algorithm 1: model training and statistics of the new task
        if new:
            replay = [*_keys(samples.memory), *_keys(extension)] if self.method.replays else []
            model = self._new_task(model, trained, replay, checkpoint, progress)
        new_head = model.tasks[-1].head if new else None
        model = self._with_frozen(model, unseen_images)
        # Algorithm 1: back-updating
        if self.method.replays and self.settings.recipe.back_update:
            memory = merged(samples.memory, extension)
            model = self._back_update(model, len(parent.tasks), memory, extension, _keys(trained), rng, progress)
        # The refined feature, of the classes of all tasks
        refined = None
        if refines(self.tokens, self.settings):
            refined = refined_feature(self.tokens, model, kept, self.settings, progress)
        model = replace(model, refined=refined)
        # The two decisions, and the gate
        model, verdict = evaluate(self.tokens, parent, samples, model, kept, self.settings, rng)
        progress.report("evaluating", 1, 1, len(kept.held_out) * len(model.tasks))
        return Learned(model, kept.hashes_only() if self.settings.draws else kept, verdict, new_head)

    def _prepare_tokens(self, parent: Model, samples: Samples, images: Images, new: Images, progress: Progress) -> None:
        """Plan the progress of the whole task, counted in images, and compute the trunk's tokens."""
        replay = _keys(samples.memory) if self.method.replays else []
        needed = sorted({*samples.learned_keys, *_keys(images)})
        trained_on = sorted({*_keys(images), *replay})
        views = [view for view in self.method.objective.views(self.settings) if view]
        total = len(needed) + len(views) * len(trained_on)
        # Back-updating and evaluating pass about every image through every task's network.
        progress.plan(total + len(needed) * (len(parent.tasks) + 1))
        if refines(self.tokens, self.settings):
            progress.plan(refining_passes(len(needed), self.settings))
        if new:
            data = TaskData(_keys(new), [], len(new), replay)
            progress.plan(image_passes(data, self.settings))
        done = 0

        def on_done(images: int) -> None:
            nonlocal done
            done += images
            progress.report("reading", done, total, images)

        self.tokens.prepare(needed, on_done=on_done)
        self.tokens.prepare(trained_on, views, on_done)

    def _extend(self, model: Model, extension: Images) -> Model:
        """Add images of known classes to the statistics of their tasks; the networks stay."""
        tasks = []
        for task in model.tasks:
            keys = [key for name in task.classes for key in extension.get(name, ())]
            if keys:
                labels = np.array([c for c, name in enumerate(task.classes) for _ in extension.get(name, ())])
                z = self.tokens.features(keys, tensors_of(task))
                task = replace(task, gaussians=task.gaussians.with_samples(z, labels))
            tasks.append(task)
        return replace(model, tasks=tuple(tasks))

    def _without(self, model: Model, corrected: Mapping[str, str]) -> Model:
        """Remove images from the frozen statistics of their earlier labels; the statistics of the tasks keep them."""
        if not corrected:
            return model
        labels = np.array([model.classes.index(name) for name in corrected.values()])
        return model.without_images(*self.tokens.frozen(list(corrected)), labels)

    def _with_frozen(self, model: Model, images: Images) -> Model:
        """Add all images of a batch, also those held out of the networks, to the frozen statistics."""
        column = {name: c for c, name in enumerate(model.classes)}
        labels = np.repeat([column[name] for name in images], [len(keys) for keys in images.values()])
        return model.with_images(*self.tokens.frozen(_keys(images)), labels)

    def _new_task(
        self,
        model: Model,
        train: Mapping[str, Sequence[str]],
        replay: list[str],
        checkpoint: Checkpoint,
        progress: Progress,
    ) -> Model:
        """Train the network of the new classes and add the task with its statistics (Algorithm 1, last line)."""
        # The first task's update holds everything: adapters without a task are not stored.
        before = model.shared if model.tasks else SharedAdapters.empty(*model.shared.used2.shape)
        shared = self.method.grown(model.shared, self.settings)
        labels = np.repeat(np.arange(len(train)), [len(keys) for keys in train.values()])
        data = TaskData(_keys(train), labels.tolist(), len(train), replay)
        trained = train_task(
            self.tokens, shared, data, self.settings, f"task {len(model.tasks) + 1}", checkpoint, progress
        )
        network = trained.network
        z = self.tokens.features(data.keys, network.tensors)
        tensors = [tensor.numpy() for tensor in network.tensors]
        task = TaskModel(
            classes=tuple(train),
            adapters=Adapters(*tensors[:4]),
            norm_w=tensors[4],
            norm_b=tensors[5],
            head=trained.head,
            gaussians=Gaussians.fit(z, labels, data.classes),
            sums=TaskSums.empty(self.backbone.spec.frozen.size, self.backbone.spec.frozen.expanded),
            update=AdapterUpdate.between(before, network.shared),
            supermask=network.supermask,
        )
        return replace(model, shared=network.shared, tasks=(*model.tasks, task))

    def _back_update(
        self,
        model: Model,
        earlier_tasks: int,
        memory: Images,
        extension: Images,
        new_images: list[str],
        rng: np.random.Generator,
        progress: Progress,
    ) -> Model:
        """Update earlier heads after a new task; without `new_images`, the heads of the extended classes only.

        `memory` holds the images of all earlier classes, those of the extension included. Each head sees the features
        of its own task's network; the research code takes those of the first task for every head, which is a bug.
        Images of a class that is merged with one of the task's classes are not `ood`: they have the same label.
        """
        quota = self.settings.keep_per_class
        size = sum(len(keys) or quota for keys in memory.values())  # |M|
        selected = [new_images[i] for i in rng.permutation(len(new_images))[:size]]
        extended = {k for k, task in enumerate(model.tasks) if any(name in extension for name in task.classes)}
        disturbed = heads_to_update(model, earlier_tasks, self.settings.recipe.back_heads) if new_images else []
        updated = sorted({*disturbed, *(extended & {*range(earlier_tasks)})})
        updates = (self._back_update_of(model, model.tasks[k], memory, selected, rng) for k in updated)
        heads: dict[int, Head] = {}
        for k, head in zip(updated, update_heads(updates, self.settings, rng), strict=True):
            heads[k] = head
            progress.report("back-updating", len(heads), len(updated), size + len(selected))
        return model.with_heads(heads)

    def _back_update_of(
        self,
        model: Model,
        task: TaskModel,
        memory: Images,
        selected: list[str],
        rng: np.random.Generator,
    ) -> BackUpdate:
        """What one earlier head is trained on; `selected` are images of the new task, which are `ood`."""
        own = [(key, c) for c, name in enumerate(task.classes) for key in memory.get(name, ())]
        labels_of_task = {label_of(name, model.aliases) for name in task.classes} - {None}
        foreign = [
            name for name in memory if name not in task.classes and label_of(name, model.aliases) not in labels_of_task
        ]
        kept = spread_over_classes({name: memory[name] for name in foreign}, self.settings.recipe.network_images)
        z_own = self.tokens.features([key for key, _ in own], tensors_of(task))
        z_kept = self.tokens.features(_keys(kept), tensors_of(task))
        z_new = self.tokens.features(selected, tensors_of(task), store=False)  # few of them are needed again
        stands_for = [len(memory[name]) / max(len(keys), 1) for name, keys in kept.items() for _ in keys]
        z_others = np.concatenate([z_kept, z_new])
        weights = np.array([*stands_for, *([1.0] * len(z_new))], np.float64)
        labels = np.array([c for _, c in own], np.int64)
        # A head that sees no image of a class unlearns it: draws stand for classes whose images were all deleted.
        deleted = np.setdiff1d(np.arange(len(task.classes)), labels).repeat(self.settings.keep_per_class)
        if len(deleted):
            z_own = np.concatenate([z_own, task.gaussians.sample(deleted, rng).astype(np.float32)])
            labels = np.concatenate([labels, deleted])
        return BackUpdate(task.head, task.gaussians, z_own, labels, z_others, weights)


def _keys(images: Images) -> list[str]:
    return [key for keys in images.values() for key in keys]
