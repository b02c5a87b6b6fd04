"""HAT's network: adapters that all tasks share, in units that the task's masks choose.

After each step of the optimiser, every entry that an earlier task uses is restored: masking the gradient (Eq. grad_mod)
is not enough, because momentum and weight decay also change weights with a zero gradient.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from models.inference.shared_adapters import Adapters, SharedAdapters
from models.network import hat
from models.network.adapted_blocks import Masks, TaskTensors, apply_masks
from trainer.learning.adapter_units import UnitWindow
from trainer.learning.methods.network import Objective, TaskData, TaskNetwork, TrainedNetwork
from trainer.learning.methods.shards import SHARD, Gradient, Shard
from trainer.learning.processes import Job
from trainer.learning.reproducibility import random_stream
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

ADAPTER_TENSORS = ("w1", "b1", "w2", "b2")
NORMS = ("norm_w", "norm_b")
EMBEDDINGS = ("e1", "e2")


class HatNetwork(TaskNetwork):
    """The adapters within the task's window of units, its norms and the embeddings of its masks."""

    def __init__(
        self,
        tokens: TokenCache,
        shared: SharedAdapters,
        data: TaskData,
        settings: LearnerSettings,
        name: str,
        objective: Objective,
    ) -> None:
        """`shared` has free units; `name` is that of the task, for its random numbers."""
        self._shared, self._window = shared, UnitWindow.choose(shared, settings)
        own = self._window.cut(shared)
        backbone, rng = tokens.backbone, random_stream(settings.seed, name, "start")
        a, d, b = backbone.adapters, backbone.spec.dimensions, own.bottleneck
        start = {part: getattr(own.adapters, part) for part in ADAPTER_TENSORS}
        protected = hat.protection(torch.tensor(own.used1), torch.tensor(own.used2))
        if objective.starts_at_closed_form(backbone, settings):
            for key in ("w2", "b2"):  # free units may have been trained by earlier tasks that did not keep them
                start[key] = np.where(protected[key].numpy(), start[key], 0.0)
        start |= {"norm_w": backbone.norm_w.numpy(), "norm_b": backbone.norm_b.numpy()}
        start |= {"e1": rng.standard_normal((a, b)), "e2": rng.standard_normal((a, d))}
        start |= objective.start(tokens, data, settings, rng)
        # Weight decay suits weights, but neither masks nor the gains of norms.
        decayed = [key for key in start if key in ("w1", "w2") or (key.endswith("_w") and key not in NORMS)]
        rates = dict.fromkeys(start, objective.rate(settings)) | dict.fromkeys(EMBEDDINGS, settings.recipe.mask_rate)
        super().__init__(tokens, settings, objective, start, rates, decayed)
        self.used1, self.used2 = (torch.tensor(used, device=tokens.device) for used in (own.used1, own.used2))
        self.protected = {key: entries.to(tokens.device) for key, entries in protected.items()}

    @property
    def tensors(self) -> TaskTensors:
        return tensors_of(self.parameters)

    def masks(self, s: float) -> Masks:
        return masks_of(self.parameters, s)

    def at(self, step: int, steps: int) -> tuple[TaskTensors, Masks, Tensor]:
        """With the masks' temperature of the step, and their price (Eq. hat_reg)."""
        recipe = self.settings.recipe
        masks = self.masks(hat.temperature(step, steps, recipe.anneal))
        return (
            self.tensors,
            masks,
            recipe.sparsity * hat.sparsity(list(masks), [self.used1, self.used2], recipe.windowed),
        )

    def shard_size(self, images: int) -> int:
        """The gradient of a CNN, with one token per image, takes less time than sending it."""
        return SHARD if self.tokens.backbone.spec.is_transformer and self.objective.separable else images

    def gradients(self, shards: Sequence[Shard], step: int, steps: int) -> Iterable[Gradient]:
        """Computed by all processes of the trainer."""
        s = hat.temperature(step, steps, self.settings.recipe.anneal)
        parameters = {key: value.detach() for key, value in self.parameters.items()}
        return self.tokens.processes.map(
            shards,
            lambda shard: self.gradient_of(shard, step, steps),
            lambda shard: Job(
                "gradient",
                {"s": s, "share": shard.share},
                {**parameters, "tokens": shard.tokens, "labels": shard.labels},
            ),
            lambda answer: Gradient(float(answer.pop("loss")), answer),
        )

    def step(self, gradients: Mapping[str, Tensor]) -> None:
        self._set_gradients(gradients)
        before = {key: self.parameters[key].detach().clone() for key in ADAPTER_TENSORS}
        self.optimiser.step()
        with torch.no_grad():
            for key, old in before.items():
                parameter = self.parameters[key]
                parameter.copy_(torch.where(self.protected[key], old, parameter))
            for key in EMBEDDINGS:
                self.parameters[key].clamp_(-hat.E_CLIP, hat.E_CLIP)

    def finish(self) -> TrainedNetwork:
        """Fold the hard masks into the task's tensors and add them to the cumulative masks."""
        values = {key: value.detach().cpu() for key, value in self.parameters.items()}
        m1, m2 = hat.hard_mask(values["e1"]), hat.hard_mask(values["e2"])
        tensors = apply_masks(TaskTensors(*(tensor.detach().cpu() for tensor in self.tensors)), m1, m2)
        adapters = Adapters(**{part: values[part].numpy() for part in ADAPTER_TENSORS})
        used1, used2 = torch.maximum(self.used1.cpu(), m1), torch.maximum(self.used2.cpu(), m2)
        trained = SharedAdapters(adapters, used1.numpy(), used2.numpy())
        return TrainedNetwork(tensors, self._window.put(self._shared, trained))


def tensors_of(parameters: Mapping[str, Tensor]) -> TaskTensors:
    return TaskTensors(*(parameters[key] for key in TaskTensors._fields))


def masks_of(parameters: Mapping[str, Tensor], s: float) -> Masks:
    return Masks(*(hat.soft_mask(parameters[key], s) for key in EMBEDDINGS))
