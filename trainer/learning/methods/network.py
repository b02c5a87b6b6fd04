"""A task's network in training: what all methods share.

A method combines two parts: a network, which says what is trained and how earlier tasks are protected (`hat`,
`supermask`), and an objective, which says on which images and for which loss (`replay`, `csi`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.inference.model import Head
from models.inference.shared_adapters import SharedAdapters
from models.inference.supermask import Supermask
from models.network.adapted_blocks import Masks, TaskTensors
from models.network.backbone import Backbone
from trainer.learning.checkpoint import Tensors
from trainer.learning.methods.shards import Gradient, Shard, cut, gradient, summed
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


class TaskData(NamedTuple):
    """The training images of a task."""

    keys: Sequence[str]
    labels: Sequence[int]  # 0 .. classes - 1
    classes: int
    replay: Sequence[str]  # images of the replay memory, learned as `ood`


class Batch(NamedTuple):
    """The images of one step: a view of an image each, and the output that it is to have."""

    keys: Sequence[str]
    views: Sequence[int]
    labels: Sequence[int]


class TrainedNetwork(NamedTuple):
    """The task's folded tensors, and the shared adapters with its units marked as used."""

    tensors: TaskTensors
    shared: SharedAdapters
    supermask: Supermask | None = None


@dataclass(frozen=True)
class TrainedTask:
    network: TrainedNetwork
    head: Head


class Objective(Protocol):
    """What a network is trained for."""

    separable: bool  # whether the loss of a batch is the mean of the losses of its images

    def views(self, settings: LearnerSettings) -> Sequence[int]:
        """The views of a training image that are needed."""

    def rows(self, data: TaskData) -> int:
        """Rows of a batch per training image, for the progress."""

    def start(
        self, tokens: TokenCache, data: TaskData, settings: LearnerSettings, rng: np.random.Generator
    ) -> dict[str, NDArray[np.floating]]:
        """The parameters on top of the network, by name; weight decay applies to names that end in `_w`."""

    def starts_at_closed_form(self, backbone: Backbone, settings: LearnerSettings) -> bool:
        """Whether a network starts at the closed form: adapters that add nothing, and a solved head on top."""

    def rate(self, settings: LearnerSettings) -> float:
        """The learning rate of what the network and the objective learn, relative to that of the settings."""

    def batch(
        self, data: TaskData, chosen: NDArray[np.int64], rng: np.random.Generator, settings: LearnerSettings
    ) -> Batch:
        """The rows of a step over the chosen training images."""

    def loss(self, z: Tensor, labels: Tensor, parameters: dict[str, Tensor], settings: LearnerSettings) -> Tensor: ...

    def head(
        self,
        tokens: TokenCache,
        tensors: TaskTensors,
        data: TaskData,
        parameters: dict[str, Tensor],
        settings: LearnerSettings,
    ) -> Head:
        """The head of a network whose training has ended."""


def passes(images: int, settings: LearnerSettings) -> int:
    """Passes over the images per epoch, so that the mask temperature s rises over at least `min_steps` steps."""
    return max(1, -(-settings.min_steps * min(settings.batch_size, images) // max(images, 1)))


class TaskNetwork(ABC):
    """The parameters in training, by name: a checkpoint holds them and the state of the optimiser."""

    def __init__(
        self,
        tokens: TokenCache,
        settings: LearnerSettings,
        objective: Objective,
        start: dict[str, NDArray[np.floating]],
        rates: dict[str, float],
        decayed: Sequence[str] = (),
    ) -> None:
        """`rates` are relative to the learning rate, for the parameters that do not have it."""
        self.tokens, self.settings, self.objective = tokens, settings, objective
        adam, recipe = objective.starts_at_closed_form(tokens.backbone, settings), settings.recipe
        self.parameters = {
            key: torch.tensor(value, dtype=torch.float32, device=tokens.device, requires_grad=True)
            for key, value in start.items()
        }
        groups: list[dict[str, Any]] = []
        for key in self.parameters:
            rate = (settings.learning_rate or (recipe.adam_rate if adam else recipe.sgd_rate)) * rates.get(key, 1.0)
            decay = recipe.weight_decay if key in decayed else 0.0
            groups.append({"params": [self.parameters[key]], "lr": rate, "weight_decay": decay})
        # Which optimiser suits which start was measured: docs/decisions/0038.
        self.optimiser: torch.optim.Optimizer = (
            torch.optim.AdamW(groups) if adam else torch.optim.SGD(groups, momentum=recipe.momentum)
        )

    @abstractmethod
    def at(self, step: int, steps: int) -> tuple[TaskTensors, Masks | None, Tensor | None]:
        """The network at a step of an epoch: its tensors, its soft masks, and what they cost in the loss."""

    @abstractmethod
    def step(self, gradients: Mapping[str, Tensor]) -> None:
        """One step of the optimiser that changes nothing which an earlier task uses."""

    @abstractmethod
    def finish(self) -> TrainedNetwork:
        """The network with hard masks."""

    def epoch(self, data: TaskData, rng: np.random.Generator, on_step: Callable[[], None] = lambda: None) -> float:
        """Train on batches of the task's images; the mean loss."""
        size, count = min(self.settings.batch_size, len(data.keys)), passes(len(data.keys), self.settings)
        order, losses = np.concatenate([rng.permutation(len(data.keys)) for _ in range(count)]), []
        starts = range(0, len(order), size)
        for step, start in enumerate(starts):
            batch = self.objective.batch(data, order[start : start + size], rng, self.settings)
            tokens = self.tokens.get(batch.keys, batch.views)
            labels = torch.tensor(batch.labels, device=tokens.device)
            losses.append(self._train_on(cut(tokens, labels, self.shard_size(len(labels))), step, len(starts)))
            on_step()
        return float(np.mean(losses))

    def shard_size(self, images: int) -> int:
        """Of a batch with so many images. A network that no other process can compute has one shard."""
        return images

    def gradients(self, shards: Sequence[Shard], step: int, steps: int) -> Iterable[Gradient]:
        """Of each shard at a step of an epoch."""
        return (self.gradient_of(shard, step, steps) for shard in shards)

    def gradient_of(self, shard: Shard, step: int, steps: int) -> Gradient:
        return gradient(self.parameters, self._loss(shard, step, steps))

    def _train_on(self, shards: Sequence[Shard], step: int, steps: int) -> float:
        """One step on a batch; returns the loss."""
        total = summed(self.gradients(shards, step, steps))
        self.step(total.by_name)
        return total.loss

    def _loss(self, shard: Shard, step: int, steps: int) -> Tensor:
        tensors, masks, price = self.at(step, steps)
        z = self.tokens.backbone.blocks(shard.tokens, tensors, masks)
        loss = shard.share * self.objective.loss(z, shard.labels, self.parameters, self.settings)
        return loss + price if shard.first and price is not None else loss

    def _set_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        for key, parameter in self.parameters.items():
            parameter.grad = gradients.get(key)

    def state(self) -> Tensors:
        out = {key: value.detach().cpu().numpy() for key, value in self.parameters.items()}
        for key, parameter in self.parameters.items():
            for name, value in self.optimiser.state.get(parameter, {}).items():
                if value is not None:
                    out[f"{name}.{key}"] = value.cpu().numpy()
        return out

    def restore(self, state: Tensors) -> None:
        with torch.no_grad():
            for key, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(state[key]))
        plain, keys = self.optimiser.state_dict(), list(self.parameters)
        plain["state"] = {number: {} for number in range(len(keys))}
        for stored, value in state.items():
            name, _, key = stored.rpartition(".")
            if name:
                plain["state"][keys.index(key)][name] = torch.tensor(value)
        self.optimiser.load_state_dict(plain)  # to the parameters' device, where the optimiser wants it there
