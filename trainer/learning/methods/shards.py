"""The gradient of a batch: the sum over its shards, in their order. One process and several give the same bits."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

SHARD = 16  # images


class Shard(NamedTuple):
    """A part of a batch, for which one process computes loss and gradient."""

    tokens: Tensor  # (n, P, d)
    labels: Tensor  # (n,)
    share: float  # of the images of the batch
    first: bool  # what does not depend on the images is added once per batch


class Gradient(NamedTuple):
    loss: float
    by_name: Mapping[str, Tensor]  # of the parameters that the loss depends on


def cut(tokens: Tensor, labels: Tensor, size: int) -> list[Shard]:
    """The shards of a batch, the last one smaller."""
    count = len(labels)
    return [
        Shard(tokens[start : start + size], labels[start : start + size], min(size, count - start) / count, start == 0)
        for start in range(0, count, size)
    ]


def gradient(parameters: Mapping[str, Tensor], loss: Tensor) -> Gradient:
    found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    by_name = {key: value for key, value in zip(parameters, found, strict=True) if value is not None}
    return Gradient(float(loss.detach()), by_name)


def summed(gradients: Iterable[Gradient]) -> Gradient:
    loss, total = 0.0, dict[str, Tensor]()
    for one in gradients:
        loss += one.loss
        total |= {key: total[key] + value if key in total else value for key, value in one.by_name.items()}
    return Gradient(loss, total)
