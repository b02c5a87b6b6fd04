"""The tail of a CNN: its last stages, with an adapter before each of them, from a map of spatial tokens to a feature.

    trunk(pixels) -> map       the output of the stages before, frozen
    tail(map, tensors) -> z    the last two stages and the pooling, frozen, with adapters that a version has learned

Adapters act before the pooling, on every position of the map: a pooled feature has lost what they can still change.
With tensors of zeros the tail is the backbone itself. The tensors are inputs, so one ONNX graph serves every version.
Shapes: N images, c channels and h x w positions of a map, B units, r dimensions of z.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.efficientnet import EfficientNet
from torch import Tensor, nn

PARTS = ("gain", "down", "down_bias", "up", "up_bias")


class Tail(nn.Module):
    """The frozen stages of the tail: (map, tensors in the order of `names`) -> z (N, r)."""

    def __init__(
        self, stages: Sequence[nn.Module], output: nn.Module, channels: Sequence[int], shape: tuple[int, int, int]
    ) -> None:
        """`channels` of the maps before each stage and before the output; `shape` (c, h, w) of the first map."""
        super().__init__()
        self.stages, self.output = nn.ModuleList(stages), output
        self.channels, self.shape = tuple(channels), shape

    def forward(self, x: Tensor, *tensors: Tensor) -> Tensor:  # (N, c, h, w) -> (N, r)
        for place, stage in enumerate((*self.stages, self.output)):
            x = stage(adapted(x, *tensors[place * len(PARTS) : (place + 1) * len(PARTS)]))
        return x

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{part}.{place}" for place in range(len(self.channels)) for part in PARTS)

    def zeros(self, units: int) -> dict[str, Tensor]:
        """Tensors with which the tail is the backbone itself."""
        out: dict[str, Tensor] = {}
        for place, c in enumerate(self.channels):
            shapes = (c,), (units, c), (units,), (c, units), (c,)
            out |= {f"{part}.{place}": torch.zeros(shape) for part, shape in zip(PARTS, shapes, strict=True)}
        return out

    def arguments(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [tensors[name] for name in self.names]


def adapted(x: Tensor, gain: Tensor, down: Tensor, down_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    """x (1 + gain) + W2 relu(W1 x + b1) + b2, at each position."""
    hidden = torch.relu(F.conv2d(x, down[:, :, None, None], down_bias))
    return x * (1 + gain[None, :, None, None]) + F.conv2d(hidden, up[:, :, None, None], up_bias)


class _Output(nn.Module):
    """What follows the last stage of an EfficientNet: its last convolution, and the pooling."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.conv, self.norm = model.conv_head, model.bn2

    def forward(self, x: Tensor) -> Tensor:  # (N, c, h, w) -> (N, r)
        out: Tensor = self.norm(self.conv(x)).mean((2, 3))
        return out


def tail_of(model: Any, last_map: Tensor) -> Tail | None:
    """The tail behind the stage before the last, whose output for one image is `last_map`; None if it has none.

    Of timm's CNNs, those of the EfficientNet family consist of such stages; others are not cut.
    """
    if not isinstance(model, EfficientNet) or not isinstance(model.conv_head, nn.Conv2d):
        return None
    stages, channels, x = list(model.blocks[model.stage_ends[-2] :]), [], last_map
    with torch.inference_mode():
        for stage in stages:
            channels.append(x.shape[1])
            x = stage(x)
    _, c, h, w = last_map.shape
    return Tail(stages, _Output(model), [*channels, x.shape[1]], (c, h, w))
