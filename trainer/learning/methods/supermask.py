"""Supermask's network (SupSup): fixed weights, and a mask of them for each task, found by Edge Popup.

Each weight has a score. The network uses the weights with the highest scores, the share `supermask_kept` of each layer.
The choice has no gradient, so the score of every weight, chosen or not, gets that of the masked weight times the weight
(straight through). **Tasks share nothing that is trained, so no task can change another one.**
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function

from models.inference.shared_adapters import SharedAdapters
from models.inference.supermask import Supermask, fixed_weights
from models.network.adapted_blocks import TaskTensors
from trainer.learning.methods.network import Objective, TaskData, TaskNetwork, TrainedNetwork
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

SCORES = ("v1", "v2")


class SupermaskNetwork(TaskNetwork):
    """The scores of the adapters' weights. Norms are the backbone's own, and there are no biases."""

    def __init__(
        self,
        tokens: TokenCache,
        shared: SharedAdapters,
        data: TaskData,
        settings: LearnerSettings,
        name: str,
        objective: Objective,
    ) -> None:
        backbone, recipe = tokens.backbone, settings.recipe
        rng = random_stream(settings.seed, name, "start")
        a, b, d = backbone.adapters, recipe.supermask_units, backbone.spec.dimensions
        self._shape, self._shared = (a, b, d), shared
        fixed = fixed_weights(a, b, d, recipe.supermask_kept, recipe.supermask_scale)
        self._fixed = [torch.tensor(weights, device=tokens.device) for weights in fixed]
        start = {"v1": rng.uniform(-1, 1, (a, b, d)) / d**0.5, "v2": rng.uniform(-1, 1, (a, d, b)) / b**0.5}
        start |= objective.start(tokens, data, settings, rng)
        decayed = [key for key in start if key.endswith("_w")]
        rate = objective.rate(settings)
        rates = dict.fromkeys(start, rate) | dict.fromkeys(SCORES, rate * recipe.score_rate)
        super().__init__(tokens, settings, objective, start, rates, decayed)

    @property
    def tensors(self) -> TaskTensors:
        """The fixed weights under the masks that the present scores give."""
        a, b, d = self._shape
        kept = self.settings.recipe.supermask_kept
        pairs = zip(self._fixed, SCORES, strict=True)
        w1, w2 = (weights * top_mask(self.parameters[key], kept) for weights, key in pairs)
        backbone, device = self.tokens.backbone, w1.device
        norms = (backbone.norm_w.to(device), backbone.norm_b.to(device))
        return TaskTensors(w1, w1.new_zeros(a, b), w2, w2.new_zeros(a, d), *norms)

    def at(self, step: int, steps: int) -> tuple[TaskTensors, None, None]:
        return self.tensors, None, None

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        self._set_gradients(gradients)
        self.optimiser.step()

    def finish(self) -> TrainedNetwork:
        recipe = self.settings.recipe
        masks = [top_mask(self.parameters[key].detach(), recipe.supermask_kept) for key in SCORES]
        bits = [mask.cpu().numpy().astype(bool) for mask in masks]
        supermask = Supermask.pack(bits[0], bits[1], recipe.supermask_kept, recipe.supermask_scale)
        own, backbone = supermask.adapters(), self.tokens.backbone
        w1, b1, w2, b2 = (torch.from_numpy(array) for array in (own.w1, own.b1, own.w2, own.b2))
        tensors = TaskTensors(w1, b1, w2, b2, backbone.norm_w.cpu(), backbone.norm_b.cpu())
        return TrainedNetwork(tensors, self._shared, supermask)


def top_mask(scores: Tensor, kept: float) -> Tensor:
    """1 for the share `kept` of the highest scores of each layer (A, ...), 0 elsewhere; its gradient is that of 1."""
    mask: Tensor = _TopMask.apply(scores, kept)
    return mask


class _TopMask(Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, kept: float) -> Tensor:
        flat = scores.detach().flatten(1)
        count = max(1, int(np.rint(kept * flat.shape[1])))
        # A fifth of the time of torch.topk, which sorts what it finds.
        highest = np.argpartition(flat.cpu().numpy(), -count, axis=1)[:, -count:]
        mask = torch.zeros_like(flat).scatter_(1, torch.from_numpy(highest).to(flat.device), 1.0)
        return mask.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
