"""Refine the feature: train the adapters of a CNN's tail on the kept images of all classes (models/network/tail.py).

The adapters start as the identity, and the classifier at its optimum on the frozen feature: training starts at the
closed form. A start at the parent's adapters trains longer on the same images; that separates the learned classes
better, and novel images worse. Held-out images are never trained on, so both decisions can be fitted on them; they are
in the statistics of their classes (refined_statistics.py). The work has a bound: it does not grow with the number of
classes.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.inference.model import Model
from models.inference.refined import RefinedFeature
from models.network.tail import Tail
from trainer.learning.adapter_units import truncated_normal
from trainer.learning.head_solver import solved_head
from trainer.learning.memory import Samples, spread_over_classes
from trainer.learning.progress import Progress
from trainer.learning.refined_statistics import RefinedStatistics
from trainer.learning.reproducibility import random_stream, torch_threads
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

PHASE = "refining"
REPORTS = 10  # of the progress
THREADS = 2  # the same number with any number of processes: the last bits of sums depend on it


def refines(tokens: TokenCache, settings: LearnerSettings) -> bool:
    """Whether versions have a refined feature: it replays kept images, and needs a rule that weighs it."""
    replays = settings.replays and settings.keep in (None, "images")
    return tokens.backbone.tail is not None and replays and settings.weighs_frozen_evidence and settings.recipe.refine


def image_passes(images: int, settings: LearnerSettings) -> int:
    """Images that pass through the tail in one training."""
    return min(settings.recipe.refined_epochs * images, settings.recipe.refined_passes)


def refined_feature(
    tokens: TokenCache, model: Model, samples: Samples, settings: LearnerSettings, progress: Progress
) -> RefinedFeature | None:
    """The refined feature of the model's classes, from their kept images; None if a class has none left."""
    chosen = spread_over_classes(samples.memory, settings.recipe.refined_images)
    if tokens.backbone.tail is None or not all(chosen.get(name) for name in model.classes):
        return None
    keys = [key for name in model.classes for key in chosen[name]]
    labels = np.repeat(np.arange(len(model.classes)), [len(chosen[name]) for name in model.classes])
    rng = random_stream(settings.seed, PHASE, *model.classes)
    maps = tokens.maps(keys)
    start = _start(tokens.backbone.tail, settings, rng)
    pooled = tokens.get(keys)[:, 0, : tokens.backbone.spec.dimensions]  # what the tail gives before any training
    z = _layer_norm(pooled).cpu().numpy()
    head = solved_head(z, labels, len(model.classes), settings.recipe.start_ridge)
    trained = {name: torch.tensor(array, device=tokens.device, requires_grad=True) for name, array in start.items()}
    weight, bias = (torch.from_numpy(part).to(tokens.device).requires_grad_() for part in (head.weight, head.bias))
    with torch_threads(THREADS):
        _train(tokens.backbone.tail.eval(), trained, weight, bias, maps, labels, settings, rng, progress)
    tail = {name: tensor.detach().cpu().numpy() for name, tensor in trained.items()}
    statistics = RefinedStatistics.of(tokens, tail, model.classes, samples, settings)
    return None if statistics is None else statistics.feature


def _train(
    tail: Tail,
    tensors: Mapping[str, Tensor],
    weight: Tensor,
    bias: Tensor,
    maps: Tensor,
    labels: NDArray[np.int64],
    settings: LearnerSettings,
    rng: np.random.Generator,
    progress: Progress,
) -> None:
    """Cross-entropy of all classes by Adam, in place; the rate falls along half a cosine."""
    recipe, device = settings.recipe, weight.device
    optimiser = torch.optim.AdamW(
        [*tensors.values(), weight, bias], lr=recipe.refined_rate, weight_decay=recipe.refined_decay
    )
    steps = math.ceil(image_passes(len(maps), settings) / settings.batch_size)
    order: list[int] = []
    for step in range(steps):
        while len(order) < settings.batch_size:
            order = [*rng.permutation(len(maps)).tolist(), *order]
        batch = [order.pop() for _ in range(settings.batch_size)]
        x = maps[batch].to(device, torch.float32, memory_format=torch.channels_last)
        if rng.random() < 0.5:  # mirrored images have mirrored maps, nearly
            x = x.flip(3)
        x = _window(x, recipe.refined_window, rng)
        for group in optimiser.param_groups:
            group["lr"] = recipe.refined_rate * (1 + math.cos(math.pi * step / steps)) / 2
        z = tail(x, *tail.arguments(tensors))
        logits, own = F.linear(_layer_norm(z), weight, bias), torch.from_numpy(labels[batch]).to(device)
        loss = F.cross_entropy(logits, own, label_smoothing=recipe.refined_smoothing)
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        progress.tick()
        if (step + 1) * REPORTS // steps > step * REPORTS // steps:
            progress.report(PHASE, step + 1, steps, settings.batch_size * steps / REPORTS)


def _window(x: Tensor, least: float, rng: np.random.Generator) -> Tensor:
    """A square part of the maps (N, c, h, w), of `least` of their shorter side at least: a crop, without the trunk."""
    height, width = x.shape[2:]
    longest = min(height, width)
    side = int(rng.integers(math.ceil(least * longest), longest + 1))
    top, left = (int(rng.integers(0, length - side + 1)) for length in (height, width))
    return x[:, :, top : top + side, left : left + side]


def _start(tail: Tail, settings: LearnerSettings, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
    """Adapters that add nothing: their first layers are random, their second ones 0."""
    recipe = settings.recipe
    out = {name: tensor.numpy() for name, tensor in tail.zeros(recipe.refined_units).items()}
    for place, channels in enumerate(tail.channels):
        deviation = recipe.refined_start / math.sqrt(channels)
        out[f"down.{place}"] = truncated_normal(rng, (recipe.refined_units, channels), deviation)
    return out


def _layer_norm(z: Tensor) -> Tensor:
    return F.layer_norm(z, z.shape[-1:])
