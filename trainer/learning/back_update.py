"""Back-updating (Eq. backward): train earlier heads on a new task's images as `ood`.

Only heads change. Each head is trained on features of its own task's network (the research code takes those of the
first task for every head, which is a bug).

The memory keeps few images per class, and a head that fits their noise rejects other images of its own classes. So
half of the head's own features are drawn from the task's class Gaussians, which were fitted on all of its images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from models.inference.gaussians import Gaussians
from models.inference.model import Head, Model
from models.network.adapted_blocks import tensors_of
from trainer.learning.progress import Progress
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


def back_update(
    model: Model,
    earlier_tasks: int,
    memory: Mapping[str, Sequence[str]],
    extended: Mapping[str, Sequence[str]],
    new_images: Sequence[str],
    tokens: TokenCache,
    settings: LearnerSettings,
    rng: np.random.Generator,
    progress: Progress,
) -> Model:
    """Update every earlier head after a new task; without `new_images`, the heads of the `extended` classes only.

    `memory` holds the images of all earlier classes, those that extend them included.
    """
    quota = max(1, settings.replay_size // max(1, len(memory)))
    size = sum(len(keys) or quota for keys in memory.values())  # |M|
    selected = [new_images[i] for i in rng.permutation(len(new_images))[:size]]
    heads: dict[int, Head] = {}
    for j, task in enumerate(model.tasks[:earlier_tasks]):
        if not new_images and not any(name in extended for name in task.classes):
            continue
        own = [(key, c) for c, name in enumerate(task.classes) for key in memory.get(name, ())]
        others = [key for name, keys in memory.items() if name not in task.classes for key in keys] + selected
        tensors = tensors_of(task)
        z_own, z_others = tokens.features([key for key, _ in own], tensors), tokens.features(others, tensors)
        labels = np.array([c for _, c in own], np.int64)
        # A head that sees no image of a class unlearns it: draws stand for classes whose images were all deleted.
        deleted = np.setdiff1d(np.arange(len(task.classes)), labels).repeat(quota)
        if len(deleted):
            z_own = np.concatenate([z_own, task.gaussians.sample(deleted, rng).astype(np.float32)])
            labels = np.concatenate([labels, deleted])
        heads[j] = update_head(task.head, task.gaussians, z_own, labels, z_others, settings, rng)
        progress.report("back-updating", j + 1, earlier_tasks, len(own) + len(others))
    return model.with_heads(heads)


def update_head(
    head: Head,
    gaussians: Gaussians,
    own: NDArray[np.float32],
    own_labels: NDArray[np.int64],
    others: NDArray[np.float32],
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> Head:
    """Train the head on its own features (n, d) as its classes and on `others` (m, d) as `ood`, in equal parts."""
    if len(own) == 0:
        return head
    # Equal counts per class: a class with many images must not dominate the others of its task.
    fewest = int(np.bincount(own_labels)[np.unique(own_labels)].min())
    chosen = [_sample(np.flatnonzero(own_labels == c), fewest, rng) for c in np.unique(own_labels)]
    own, own_labels = own[np.concatenate(chosen)], own_labels[np.concatenate(chosen)]
    weight = torch.tensor(head.weight, requires_grad=True)
    bias = torch.tensor(head.bias, requires_grad=True)
    recipe = settings.recipe
    optimiser = torch.optim.SGD([weight, bias], lr=recipe.back_learning_rate, momentum=recipe.momentum)
    features = np.concatenate([own, others])
    labels = np.concatenate([own_labels, np.full(len(others), len(head.bias) - 1)])
    half, larger = recipe.back_batch // 2, max(len(own), len(others))
    for _ in range(settings.back_epochs):
        own_order, other_order = _shuffled(len(own), larger, rng), _shuffled(len(others), larger, rng) + len(own)
        drawn = gaussians.sample(own_labels[own_order], rng).astype(np.float32)
        for start in range(0, larger, half):
            part = slice(start, start + half)
            index = np.concatenate([own_order[part], other_order[part]])
            batch = features[index]
            replaced = int(recipe.back_drawn * len(own_order[part]))
            batch[:replaced] = drawn[part][:replaced]
            logits = F.linear(torch.from_numpy(batch), weight, bias)
            loss = F.cross_entropy(logits, torch.from_numpy(labels[index]))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return Head(weight.detach().numpy(), bias.detach().numpy())


def _shuffled(count: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`length` indices below `count`, in shuffled passes over all of them."""
    if count == 0:  # the only task, extended: there are no other images
        return np.zeros(0, np.int64)
    passes = [rng.permutation(count) for _ in range(-(-length // count))]
    return np.concatenate(passes)[:length].astype(np.int64)


def _sample(index: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return index if len(index) == count else np.sort(rng.choice(index, count, replace=False))
