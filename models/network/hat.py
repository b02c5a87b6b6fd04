"""HAT, hard attention to the task: masks that assign units to a task and protect them from later tasks.

In training, the mask of a unit is sigmoid(s e) (Eq. smax), with s annealed in each epoch from 1/smax to smax. The mask
of a learned task is 0 or 1 (e > 0). The cumulative mask is the element-wise maximum over the tasks learned so far.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

S_MAX = 500.0
E_CLIP = 6.0  # keeps embeddings where the gradient of the sigmoid is large enough to change their sign

Anneal = Literal["linear", "geometric"]


def temperature(step: int, steps: int, anneal: Anneal = "linear", s_max: float = S_MAX) -> float:
    """s at a step of an epoch: 1/smax at the first step, smax at the last."""
    progress = step / (steps - 1) if steps > 1 else 1.0
    if anneal == "geometric":
        return float(s_max ** (2 * progress - 1))
    return 1 / s_max + (s_max - 1 / s_max) * progress


def soft_mask(embedding: Tensor, s: float) -> Tensor:
    """Eq. smax: a = sigmoid(s e), with HAT's compensated gradient dL/de = dL/da smax sigmoid'(e)."""
    mask: Tensor = _SoftMask.apply(embedding, s)
    return mask


class _SoftMask(Function):
    """sigmoid(s e), whose gradient does not depend on s.

    HAT multiplies the gradient dL/da s sigmoid'(s e) by smax / s (cosh(s e) + 1) / (cosh(e) + 1), which is equal to
    dL/da smax sigmoid'(e). As a product, it is 0 in float32 where s e > 17: there sigmoid(s e) is exactly 1.
    """

    @staticmethod
    def forward(ctx: Any, embedding: Tensor, s: float) -> Tensor:
        ctx.save_for_backward(embedding)
        return torch.sigmoid(s * embedding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (embedding,) = ctx.saved_tensors
        a = torch.sigmoid(embedding)
        return gradients[0] * S_MAX * a * (1 - a), None


def hard_mask(embedding: Tensor) -> Tensor:
    """The mask of a learned task: 0 or 1."""
    return (embedding > 0).to(embedding.dtype)


def sparsity(masks: list[Tensor], used: list[Tensor], constant_price: bool = False) -> Tensor:
    """Eq. hat_reg without lambda: the share of the free units that this task uses.

    With a constant price, the share of all units: a unit costs the same, however many are free.
    """
    taken = torch.stack([(mask * (1 - old)).sum() for mask, old in zip(masks, used, strict=True)]).sum()
    if constant_price:
        return taken / sum(mask.numel() for mask in masks)
    free = torch.stack([(1 - old).sum() for old in used]).sum()
    return taken / torch.clamp(free, min=1.0)


def protection(used1: Tensor, used2: Tensor) -> dict[str, Tensor]:
    """The entries of the adapters (A, ...) that belong to earlier tasks and must not change (Eq. grad_mod).

    used1 (A, B) are the used bottleneck units, used2 (A, d) the used outputs. The input of W1 comes from the frozen
    network and has no mask, so a row of W1 is protected if its bottleneck unit is used.
    """
    used1, used2 = used1.bool(), used2.bool()
    return {
        "w1": used1[:, :, None],  # (A, B, 1) over (A, B, d)
        "b1": used1,
        "w2": used2[:, :, None] & used1[:, None, :],  # min(m2, m1): (A, d, B)
        "b2": used2,
    }
