"""Cross-entropy: MORE's objective, with images of earlier tasks as `ood` (Eq. ood_obj), and without any (plain HAT)."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.inference.model import Head
from models.network.adapted_blocks import TaskTensors
from trainer.learning.adapter_units import truncated_normal
from trainer.learning.methods.network import Batch, TaskData
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


class ReplayObjective:
    """Cross-entropy of a head that is trained with the network; each batch has as many replayed images as new ones."""

    separable = True
    _head: ClassVar[Callable[..., Head]] = Head  # from trained weights and biases

    def views(self, settings: LearnerSettings) -> Sequence[int]:
        return range(settings.views)

    def rows(self, data: TaskData) -> int:
        return 2 if data.replay else 1

    def start(self, rng: np.random.Generator, classes: int, dimensions: int) -> dict[str, NDArray[np.floating]]:
        return {"head_w": truncated_normal(rng, (classes + 1, dimensions)), "head_b": np.zeros(classes + 1)}

    def rate(self, settings: LearnerSettings) -> float:
        return 1.0

    def batch(
        self, data: TaskData, chosen: NDArray[np.int64], rng: np.random.Generator, settings: LearnerSettings
    ) -> Batch:
        keys, labels = [data.keys[i] for i in chosen], [data.labels[i] for i in chosen]
        if data.replay:
            replayed = rng.choice(len(data.replay), len(chosen), replace=len(chosen) > len(data.replay))
            keys += [data.replay[i] for i in replayed]
            labels += [data.classes] * len(replayed)
        return Batch(keys, rng.integers(settings.views, size=len(keys)).tolist(), labels)

    def loss(self, z: Tensor, labels: Tensor, parameters: dict[str, Tensor], settings: LearnerSettings) -> Tensor:
        return head_loss(z, labels, parameters)

    def head(
        self,
        tokens: TokenCache,
        tensors: TaskTensors,
        data: TaskData,
        parameters: dict[str, Tensor],
        settings: LearnerSettings,
    ) -> Head:
        return self._head(*(parameters[key].detach().cpu().numpy() for key in ("head_w", "head_b")))


class PlainObjective(ReplayObjective):
    """Cross-entropy over the task's own classes: HAT and SupSup alone. An `ood` output without images would only fall,
    and raise the logits of all classes with it."""

    _head = Head.without_ood

    def start(self, rng: np.random.Generator, classes: int, dimensions: int) -> dict[str, NDArray[np.floating]]:
        return {"head_w": truncated_normal(rng, (classes, dimensions)), "head_b": np.zeros(classes)}


def head_loss(z: Tensor, labels: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Eq. ood_obj: the mean cross-entropy over the task's classes and `ood`, if the head has it."""
    return F.cross_entropy(F.linear(z, parameters["head_w"], parameters["head_b"]), labels)
