"""Cross-entropy: MORE's objective, with images of earlier tasks as `ood` (Eq. ood_obj), and without any (plain HAT)."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.inference.model import Head
from models.network.adapted_blocks import TaskTensors, frozen_task
from models.network.backbone import Backbone
from trainer.learning.adapter_units import truncated_normal
from trainer.learning.head_solver import solved_head
from trainer.learning.methods.network import Batch, TaskData
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache


class ReplayObjective:
    """Cross-entropy of a head that is trained with the network; each batch has as many replayed images as new ones."""

    separable = True
    _head: ClassVar[Callable[..., Head]] = Head  # from trained weights and biases
    _more_outputs: ClassVar[int] = 1  # than classes: `ood`

    def views(self, settings: LearnerSettings) -> Sequence[int]:
        return range(settings.views)

    def rows(self, data: TaskData) -> int:
        return 2 if data.replay else 1

    def start(
        self, tokens: TokenCache, data: TaskData, settings: LearnerSettings, rng: np.random.Generator
    ) -> dict[str, NDArray[np.floating]]:
        """A random head, or the optimal one on frozen features, where `ood` weighs as much as a class."""
        outputs, dimensions = data.classes + self._more_outputs, tokens.backbone.spec.dimensions
        if not self.starts_at_closed_form(tokens.backbone, settings):
            return {"head_w": truncated_normal(rng, (outputs, dimensions)), "head_b": np.zeros(outputs)}
        # As in a back-update, the cost does not follow the number of tasks.
        replay = [data.replay[i] for i in rng.permutation(len(data.replay))[: settings.recipe.network_images]]
        frozen = frozen_task(tokens.backbone.norm_w, tokens.backbone.norm_b)
        features = tokens.features([*data.keys, *replay], frozen)
        labels = np.array([*data.labels, *([data.classes] * len(replay))], np.int64)
        head = solved_head(features, labels, outputs, settings.recipe.start_ridge / len(data.keys))
        return {"head_w": head.weight, "head_b": head.bias}

    def starts_at_closed_form(self, backbone: Backbone, settings: LearnerSettings) -> bool:
        """A CNN's network, on one token, gains nothing by it (docs/decisions/0038)."""
        start = settings.recipe.start
        return backbone.spec.is_transformer if start is None else start == "closed form"

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
    _more_outputs = 0

    def starts_at_closed_form(self, backbone: Backbone, settings: LearnerSettings) -> bool:
        return False


def head_loss(z: Tensor, labels: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
    """Eq. ood_obj: the mean cross-entropy over the task's classes and `ood`, if the head has it."""
    return F.cross_entropy(F.linear(z, parameters["head_w"], parameters["head_b"]), labels)
