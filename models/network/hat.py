"""HAT, hard attention to the task: masks that give each task its own units and keep them from later tasks.

A unit's mask in training is sigmoid(s e) (Eq. smax), with s annealed in each epoch from 1/smax to smax; when the task
is learned its mask is 0 or 1 (e > 0). The cumulative mask is the element-wise maximum over the tasks learned so far.
"""

from __future__ import annotations

import torch
from torch import Tensor

S_MAX = 500.0
E_CLIP = 6.0  # keeps every embedding where the sigmoid can still turn it round
COSH_CLIP = 50.0  # cosh overflows float32 near 89


def temperature(step: int, steps: int, s_max: float = S_MAX) -> float:
    """s at a step of an epoch: from 1/smax at the first to smax at the last."""
    progress = step / (steps - 1) if steps > 1 else 1.0
    return 1 / s_max + (s_max - 1 / s_max) * progress


def soft_mask(embedding: Tensor, s: float) -> Tensor:
    """Eq. smax: a = sigmoid(s e)."""
    return torch.sigmoid(s * embedding)


def hard_mask(embedding: Tensor) -> Tensor:
    """The learned task's mask: exactly 0 or 1."""
    return (embedding > 0).to(embedding.dtype)


def compensate(gradient: Tensor, embedding: Tensor, s: float, s_max: float = S_MAX) -> Tensor:
    """The embedding's gradient as if the mask had been sigmoid(e): annealing s would otherwise starve it."""
    numerator = torch.cosh(torch.clamp(s * embedding, -COSH_CLIP, COSH_CLIP)) + 1
    return gradient * (s_max / s) * numerator / (torch.cosh(embedding) + 1)


def sparsity(masks: list[Tensor], used: list[Tensor]) -> Tensor:
    """Eq. hat_reg without lambda: the share of the still free units that this task takes."""
    taken = torch.stack([(mask * (1 - old)).sum() for mask, old in zip(masks, used, strict=True)]).sum()
    free = torch.stack([(1 - old).sum() for old in used]).sum()
    return taken / torch.clamp(free, min=1.0)


def protection(used1: Tensor, used2: Tensor) -> dict[str, Tensor]:
    """Which entries of the adapters (A, ...) belong to earlier tasks and must not move (Eq. grad_mod).

    used1 (A, B) are the taken bottleneck units and used2 (A, d) the taken outputs. The input of W1 is the frozen
    network, always present, so a row of W1 is protected by its bottleneck unit alone.
    """
    used1, used2 = used1.bool(), used2.bool()
    return {
        "w1": used1[:, :, None],  # (A, B, 1) over (A, B, d)
        "b1": used1,
        "w2": used2[:, :, None] & used1[:, None, :],  # min(m2, m1): (A, d, B)
        "b2": used2,
    }
