"""Back-updating (Eq. backward): train earlier heads on a new task's images as `ood`.

Only heads change, so features are computed once per head.

The memory keeps few images per class, and a head that fits their noise rejects other images of its own classes. So
half of the head's own features are drawn from the task's class Gaussians, which were fitted on all of its images.
"""

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from models.inference.gaussians import Gaussians
from models.inference.model import Head
from trainer.learning.settings import LearnerSettings


def update_head(
    head: Head,
    gaussians: Gaussians,
    own: NDArray[np.float32],
    own_labels: NDArray[np.int64],
    others: NDArray[np.float32],
    settings: LearnerSettings,
    rng: np.random.Generator,
) -> Head:
    """Train the head on its own features (n, d) as its classes and on `others` (m, d) as `ood`, in equal parts.

    The classes of the head have equal weight too.
    """
    if len(own) == 0:
        return head
    weight = torch.tensor(head.weight, requires_grad=True)
    bias = torch.tensor(head.bias, requires_grad=True)
    recipe = settings.recipe
    optimiser = torch.optim.SGD([weight, bias], lr=recipe.back_learning_rate, momentum=recipe.momentum)
    features = np.concatenate([own, others])
    labels = np.concatenate([own_labels, np.full(len(others), len(head.bias) - 1)])
    # Not longer for a class with many images: the head would fit the noise of the rarest one.
    counts = np.unique_counts(own_labels).counts
    half, larger = recipe.back_batch // 2, max(len(counts) * int(counts.min()), len(others))
    own_orders = _balanced(own_labels, settings.back_epochs * larger, rng).reshape(settings.back_epochs, larger)
    for own_order in own_orders:
        other_order = _shuffled(len(others), larger, rng) + len(own)
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


def _balanced(labels: NDArray[np.int64], length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`length` indices of `labels` with equal counts per class, in shuffled passes over the images of each class.

    A class with many images must not dominate the others of its task.
    """
    members = [np.flatnonzero(labels == c) for c in np.unique(labels)]
    count = -(-length // len(members))
    rows = np.stack([own[_shuffled(len(own), count, rng)] for own in members], axis=1)  # each class once per row
    return rng.permuted(rows, axis=1).ravel()[:length]


def _shuffled(count: int, length: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """`length` indices below `count`, in shuffled passes over all of them."""
    if count == 0:  # the only task, extended: there are no other images
        return np.zeros(0, np.int64)
    passes = [rng.permutation(count) for _ in range(-(-length // count))]
    return np.concatenate(passes)[:length].astype(np.int64)
