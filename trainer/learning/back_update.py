"""Eq. backward, back-updating: earlier heads learn that the new task's images are not theirs.

Only heads move. The features are those of the head's own task (the research code takes the first task's for every
head, which is a bug), and they are computed once.

The few images a class that the memory keeps would teach a head their noise: it separates them perfectly and then
doubts the next image of its own class. So half of the head's own side is drawn from the task's class Gaussians, which
were fitted on all the images that the task ever had.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from models.inference.gaussians import Gaussians
from models.inference.model import Head
from trainer.learning.settings import LearnerSettings


def back_update(
    head: Head,
    gaussians: Gaussians,
    own: NDArray[np.float32],
    own_labels: NDArray[np.int64],
    others: NDArray[np.float32],
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> Head:
    """The head after training on its own memory (n, d) as its classes and `others` (m, d) as `ood`, half and half."""
    if len(own) == 0:
        return head
    # As many of each class: the one that people label most must not swallow its siblings.
    fewest = int(np.bincount(own_labels)[np.unique(own_labels)].min())
    chosen = [_some(np.flatnonzero(own_labels == c), fewest, rng) for c in np.unique(own_labels)]
    own, own_labels = own[np.concatenate(chosen)], own_labels[np.concatenate(chosen)]
    weight = torch.tensor(head.weight, requires_grad=True)
    bias = torch.tensor(head.bias, requires_grad=True)
    recipe = settings.recipe
    optimiser = torch.optim.SGD([weight, bias], lr=recipe.back_learning_rate, momentum=recipe.momentum)
    features = np.concatenate([own, others])
    labels = np.concatenate([own_labels, np.full(len(others), len(head.bias) - 1)])
    half, larger = recipe.back_batch // 2, max(len(own), len(others))
    for _ in range(settings.back_epochs):
        mine, theirs = _cycle(len(own), larger, rng), _cycle(len(others), larger, rng) + len(own)
        drawn = gaussians.sample(own_labels[mine], rng).astype(np.float32)
        for start in range(0, larger, half):
            part = slice(start, start + half)
            index = np.concatenate([mine[part], theirs[part]])
            batch = features[index]
            replaced = int(recipe.back_drawn * len(mine[part]))
            batch[:replaced] = drawn[part][:replaced]
            logits = F.linear(torch.from_numpy(batch), weight, bias)
            loss = F.cross_entropy(logits, torch.from_numpy(labels[index]))
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return Head(weight.detach().numpy(), bias.detach().numpy())


def _cycle(count: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`length` indices below `count`: shuffled passes, one after the other, so that none is favoured."""
    if count == 0:  # a first task that is extended has no others yet
        return np.zeros(0, np.int64)
    passes = [rng.permutation(count) for _ in range(-(-length // count))]
    return np.concatenate(passes)[:length].astype(np.int64)


def _some(index: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    return index if len(index) == count else np.sort(rng.choice(index, count, replace=False))
