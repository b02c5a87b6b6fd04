"""Back-updating (Eq. backward): train earlier heads on a new task's images as `ood`.

Only heads change, and they are linear on fixed features: a convex problem, which `head_solver` solves for all heads at
once. The preset `paper` trains them by SGD.

The memory keeps few images per class, and a head that fits their noise rejects other images of its own classes. So
half of the head's own features are drawn from the task's class Gaussians, which were fitted on all of its images.

With many tasks, a new one updates a bounded number of heads: those that could claim its images, and others in turn. A
head that is updated later learns about all classes that came since, by their kept images.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from models.inference.gaussians import Gaussians
from models.inference.model import Head, Model
from trainer.learning.head_solver import HeadProblem, solve_heads
from trainer.learning.settings import LearnerSettings

IN_TURN = 4  # about one of so many heads is updated because it is its turn


def heads_to_update(model: Model, earlier: int, most: int | None) -> list[int]:
    """The heads of the first `earlier` tasks that the later ones update: all, or at most about `most`.

    A head spoils an answer if it claims an image of a new class for one of its own, and if the frozen evidence does not
    speak against that. So the tasks are chosen whose class means, in the output of the backbone, are the most similar
    to those of the new classes. The number of tasks says whose turn it is.
    """
    if most is None or earlier <= most:
        return list(range(earlier))
    period = 1 << (earlier * IN_TURN // most).bit_length() - 1  # of two: it stays the same while the turn goes round
    chosen = set(range(earlier % period, earlier, period))
    means = (model.frozen.means - model.frozen.centre)[:, : model.frozen.output]
    means = means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12)
    of_task, cosines = model.task_of_class, means @ means[model.task_of_class >= earlier].T
    similarity = np.full(earlier, -np.inf)
    np.maximum.at(similarity, of_task[of_task < earlier], cosines[of_task < earlier].max(axis=1))
    for task in np.argsort(-similarity, kind="stable").tolist():
        if len(chosen) >= most:
            break
        chosen.add(task)
    return sorted(chosen)


@dataclass(frozen=True)
class BackUpdate:
    """An earlier head, and what it is trained on: its own images as its classes, others as `ood`, in equal parts."""

    head: Head
    gaussians: Gaussians
    own: NDArray[np.float32]  # (n, d)
    labels: NDArray[np.int64]  # (n,)
    others: NDArray[np.float32]  # (m, d)
    weights: NDArray[np.float64]  # (m,), of the others: how many images each of them stands for


def update_heads(updates: Iterable[BackUpdate], settings: LearnerSettings, rng: np.random.Generator) -> Iterator[Head]:
    """The new heads, in order. `updates` is read as far as needed, so that few heads' features are in memory."""
    if settings.recipe.back_solver == "sgd":
        return (update_head(update, settings, rng) for update in updates)
    problems = (head_problem(update, settings, rng) for update in updates)
    return solve_heads(problems)


def head_problem(update: BackUpdate, settings: LearnerSettings, rng: np.random.Generator) -> HeadProblem:
    """Own and other images weigh one half each, the classes of the head the same, and draws `back_drawn` of a class.

    Each class has as many draws as the memory has room for images.
    """
    if len(update.own) == 0:  # without its own images a head would call everything `ood`
        update = replace(update, others=update.others[:0], weights=update.weights[:0])
    classes, inverse, counts = np.unique(update.labels, return_inverse=True, return_counts=True)
    quota, drawn_share = settings.keep_per_class, settings.recipe.back_drawn
    drawn_labels = classes.repeat(quota if drawn_share else 0)
    drawn = update.gaussians.sample(drawn_labels, rng).astype(np.float32)
    own_share = 0.5 if len(update.others) else 1.0
    per_class = own_share / max(len(classes), 1)
    weights = [
        per_class * (1 - drawn_share) / counts[inverse],
        np.full(len(drawn), per_class * drawn_share / quota),
        (1 - own_share) * update.weights / max(float(update.weights.sum()), 1.0),
    ]
    ood = np.full(len(update.others), len(update.head.bias) - 1)
    features = np.concatenate([update.own, drawn, update.others])
    length = float((features**2).sum(axis=1).mean()) if len(features) else 1.0
    return HeadProblem(
        head=update.head,
        features=features,
        labels=np.concatenate([update.labels, drawn_labels, ood]),
        weights=np.concatenate(weights),
        ridge=settings.recipe.back_ridge * length / _size(counts, int(update.weights.sum())),
    )


def _size(counts: NDArray[np.int64], others: int) -> int:
    """The number of images that a head is trained on, per side.

    Each class counts as the rarest one: with more steps, or a weaker ridge, the head would fit the noise of that class.
    """
    return max(len(counts) * int(counts.min()) if len(counts) else 1, others)


def update_head(update: BackUpdate, settings: LearnerSettings, rng: np.random.Generator) -> Head:
    """The head after `back_epochs` passes of SGD."""
    head, own, own_labels, others = update.head, update.own, update.labels, update.others
    if len(own) == 0:
        return head
    weight = torch.tensor(head.weight, requires_grad=True)
    bias = torch.tensor(head.bias, requires_grad=True)
    recipe = settings.recipe
    optimiser = torch.optim.SGD([weight, bias], lr=recipe.back_learning_rate, momentum=recipe.momentum)
    features = np.concatenate([own, others])
    labels = np.concatenate([own_labels, np.full(len(others), len(head.bias) - 1)])
    half, larger = recipe.back_batch // 2, _size(np.unique_counts(own_labels).counts, len(others))
    own_orders = _balanced(own_labels, settings.back_epochs * larger, rng).reshape(settings.back_epochs, larger)
    for own_order in own_orders:
        other_order = _shuffled(len(others), larger, rng) + len(own)
        drawn = update.gaussians.sample(own_labels[own_order], rng).astype(np.float32)
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
