"""ODIN: temperature and input perturbation, as post-processing of any head (Eq. odin_softmax, Eq. odin_perturbation).

The input that is perturbed is the trunk's output, the input of all that a task has learned. In the paper it is the
image: its gradient would need the trunk backwards for every image and task, which no server does either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.accuracy.metrics import Floats
from models.inference.model import Model
from models.network.adapted_blocks import tensors_of
from trainer.learning.tokens import TokenCache

TEMPERATURE = 1000.0  # tau, the same for all tasks; it and STEP are the best of ten pairs on training images
STEP = 0.002  # epsilon
ROWS = 256


def perturbed(x: Tensor, outputs: Callable[[Tensor], Tensor], temperature: float, step: float) -> Tensor:
    """x - step sign(-grad log s(x)_best): a step that makes the class with the largest output more certain."""
    x = x.detach().clone().requires_grad_()
    best = F.log_softmax(outputs(x) / temperature, dim=1).max(dim=1).values
    (gradient,) = torch.autograd.grad(best.sum(), x)
    return (x - step * torch.sign(-gradient)).detach()


def scores(
    tokens: TokenCache, model: Model, keys: Sequence[str], temperature: float = TEMPERATURE, step: float = STEP
) -> Floats:
    """log s(x)_j of the perturbed image, for the classes of all tasks: (n, C)."""
    columns = []
    for task in model.tasks:
        tensors, size = tensors_of(task), len(task.classes)
        weight, bias = torch.from_numpy(task.head.weight[:size]), torch.from_numpy(task.head.bias[:size])

        def outputs(x: Tensor, network: object = tensors, weight: Tensor = weight, bias: Tensor = bias) -> Tensor:
            return F.linear(tokens.backbone.blocks(x, network), weight, bias)

        rows = []
        for start in range(0, len(keys), ROWS):
            x = tokens.get(keys[start : start + ROWS])
            moved = perturbed(x, outputs, temperature, step)
            with torch.no_grad():
                rows.append(F.log_softmax(outputs(moved) / temperature, dim=1).double().numpy())
        columns.append(np.concatenate(rows))
    return np.concatenate(columns, axis=1)
