"""Model training of Algorithm 1: learn one task's network with HAT.

All tasks share the adapters. After each optimiser step, every entry that an earlier task uses is restored: masking
the gradient (Eq. grad_mod) is not enough, because momentum and weight decay also change weights with a zero gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from models.inference.model import Head
from models.inference.shared_adapters import Adapters, SharedAdapters
from models.network import hat
from models.network.adapted_blocks import Masks, TaskTensors, apply_masks
from trainer.learning.adapter_units import UnitWindow, truncated_normal
from trainer.learning.checkpoint import Checkpoint, Tensors
from trainer.learning.progress import Progress
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

ADAPTER_TENSORS = ("w1", "b1", "w2", "b2")
EMBEDDINGS = ("e1", "e2")
DECAYED = ("w1", "w2", "head_w")  # weight decay suits weights, but neither masks nor the gains of norms


class TaskData(NamedTuple):
    """The training images of a task."""

    keys: Sequence[str]
    labels: Sequence[int]  # 0 .. classes - 1
    classes: int
    replay: Sequence[str]  # images of the replay memory, learned as `ood`


@dataclass(frozen=True)
class TrainedTask:
    """The task's folded tensors and head, and the shared adapters with its units marked as used."""

    tensors: TaskTensors
    head: Head
    shared: SharedAdapters


def image_passes(data: TaskData, settings: LearnerSettings) -> int:
    """Images that pass through the network in one training, for the progress."""
    return settings.epochs * _passes(len(data.keys), settings) * len(data.keys) * (2 if data.replay else 1)


def _passes(images: int, settings: LearnerSettings) -> int:
    """Passes over the images per epoch, so that the mask temperature s rises over at least `min_steps` steps."""
    return max(1, -(-settings.recipe.min_steps * min(settings.batch_size, images) // max(images, 1)))


class _TaskNetwork:
    """The parameters in training, by name: a checkpoint holds them and the optimiser's momentum."""

    def __init__(
        self, tokens: TokenCache, shared: SharedAdapters, classes: int, settings: LearnerSettings, name: str
    ) -> None:
        self._tokens, self._settings = tokens, settings
        backbone, device, rng = tokens.backbone, tokens.device, random_stream(settings.seed, name, "start")
        a, d, b = backbone.adapters, backbone.spec.dimensions, shared.bottleneck
        start = {part: getattr(shared.adapters, part) for part in ADAPTER_TENSORS}
        start |= {"norm_w": backbone.norm_w.numpy(), "norm_b": backbone.norm_b.numpy()}
        start |= {"e1": rng.standard_normal((a, b)), "e2": rng.standard_normal((a, d))}
        start |= {"head_w": truncated_normal(rng, (classes + 1, d)), "head_b": np.zeros(classes + 1)}
        self.parameters = {
            key: torch.tensor(value, dtype=torch.float32, device=device, requires_grad=True)
            for key, value in start.items()
        }
        self.used1, self.used2 = (torch.tensor(used, device=device) for used in (shared.used1, shared.used2))
        self.protected = hat.protection(self.used1, self.used2)
        others = self.parameters.keys() - {*DECAYED, *EMBEDDINGS}
        groups: list[dict[str, Any]] = [
            {"params": [self.parameters[key] for key in DECAYED], "weight_decay": settings.recipe.weight_decay},
            {
                "params": [self.parameters[key] for key in EMBEDDINGS],
                "lr": settings.learning_rate * settings.recipe.mask_rate,
            },
            {"params": [self.parameters[key] for key in sorted(others)]},
        ]
        self.optimiser = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.recipe.momentum)

    @property
    def tensors(self) -> TaskTensors:
        return TaskTensors(*(self.parameters[key] for key in (*ADAPTER_TENSORS, "norm_w", "norm_b")))

    def masks(self, s: float) -> Masks:
        return Masks(*(hat.soft_mask(self.parameters[key], s) for key in EMBEDDINGS))

    def epoch(self, data: TaskData, rng: np.random.Generator, on_step: Callable[[], None] = lambda: None) -> float:
        """Train on batches of new images, each with as many replayed ones as `ood` (Eq. ood_obj + Eq. hat_reg)."""
        tokens, settings = self._tokens, self._settings
        batch, passes = min(settings.batch_size, len(data.keys)), _passes(len(data.keys), settings)
        order, losses = np.concatenate([rng.permutation(len(data.keys)) for _ in range(passes)]), []
        starts = range(0, len(order), batch)
        for step, start in enumerate(starts):
            chosen = order[start : start + batch]
            keys, labels = [data.keys[i] for i in chosen], [data.labels[i] for i in chosen]
            if data.replay:
                replayed = rng.choice(len(data.replay), len(chosen), replace=len(chosen) > len(data.replay))
                keys += [data.replay[i] for i in replayed]
                labels += [data.classes] * len(replayed)
            views = rng.integers(settings.views, size=len(keys)).tolist()
            masks = self.masks(hat.temperature(step, len(starts), settings.recipe.anneal))
            z = tokens.backbone.blocks(tokens.get(keys, views), self.tensors, masks)
            logits = F.linear(z, self.parameters["head_w"], self.parameters["head_b"])
            loss = F.cross_entropy(logits, torch.tensor(labels, device=z.device))
            price = settings.recipe.sparsity
            loss = loss + price * hat.sparsity(list(masks), [self.used1, self.used2], settings.recipe.windowed)
            self.step(loss)
            losses.append(float(loss.detach()))
            on_step()
        return float(np.mean(losses))

    def step(self, loss: Tensor) -> None:
        """One optimiser step that leaves the entries of earlier tasks exactly as they are."""
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        before = {key: self.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
        self.optimiser.step()
        with torch.no_grad():
            for key, old in before.items():
                parameter = self.parameters[key]
                parameter.copy_(torch.where(self.protected[key], old, parameter))
            for key in EMBEDDINGS:
                self.parameters[key].clamp_(-hat.E_CLIP, hat.E_CLIP)

    def state(self) -> Tensors:
        out = {key: value.detach().cpu().numpy() for key, value in self.parameters.items()}
        for key, value in self.parameters.items():
            momentum = self.optimiser.state.get(value, {}).get("momentum_buffer")
            if momentum is not None:
                out[f"momentum.{key}"] = momentum.cpu().numpy()
        return out

    def restore(self, state: Tensors) -> None:
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(state[key]))
                if f"momentum.{key}" in state:
                    buffer = torch.from_numpy(state[f"momentum.{key}"]).to(parameter.device)
                    self.optimiser.state[parameter]["momentum_buffer"] = buffer

    def finish(self) -> TrainedTask:
        """Fold the hard masks into the task's tensors and add them to the cumulative masks."""
        values = {key: value.detach().cpu() for key, value in self.parameters.items()}
        m1, m2 = hat.hard_mask(values["e1"]), hat.hard_mask(values["e2"])
        tensors = apply_masks(TaskTensors(*(tensor.detach().cpu() for tensor in self.tensors)), m1, m2)
        adapters = Adapters(**{part: values[part].numpy() for part in ADAPTER_TENSORS})
        used1, used2 = torch.maximum(self.used1.cpu(), m1), torch.maximum(self.used2.cpu(), m2)
        head = Head(values["head_w"].numpy(), values["head_b"].numpy())
        return TrainedTask(tensors, head, SharedAdapters(adapters, used1.numpy(), used2.numpy()))


def train_task(
    tokens: TokenCache,
    shared: SharedAdapters,
    data: TaskData,
    settings: LearnerSettings,
    phase: str,
    checkpoint: Checkpoint,
    progress: Progress,
) -> TrainedTask:
    """Train the network of the task that `phase` names, resuming from the checkpoint of that phase."""
    window = UnitWindow.choose(shared, settings)
    network = _TaskNetwork(tokens, window.cut(shared), data.classes, settings, phase)
    finished, state = checkpoint.load(phase)
    if finished:
        network.restore(state)
    per_epoch = image_passes(data, settings) / settings.epochs
    progress.skip(finished * per_epoch)
    for epoch in range(finished, settings.epochs):
        loss = network.epoch(data, random_stream(settings.seed, phase, "epoch", epoch), progress.tick)
        checkpoint.save(phase, epoch + 1, network.state())
        progress.report(phase, epoch + 1, settings.epochs, per_epoch, loss, saved=True)
    trained = network.finish()
    return replace(trained, shared=window.put(shared, trained.shared))
