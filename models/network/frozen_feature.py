"""The frozen feature: what the backbone itself sees in an image, the same for every task, computed once per image.

    feature    (N, f)  parts of the backbone's output, each transformed and scaled to length 1; the whole has length 1
    expanded   (N, M)  relu(feature @ P), random features for a linear classifier (RanPAC, McDonnell et al. 2023)

P is fixed. It is a weight of the exported graph, so a server needs no random numbers.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from models.network.adapted_blocks import AdaptedBlocks, TaskTensors
from models.versions.backbone_spec import FrozenSpec

EXPANDED = 1024  # M for new data folders
PROJECTION_SEED = 0


class FrozenFeature(nn.Module):
    """Tokens -> (feature, expanded)."""

    def __init__(self, spec: FrozenSpec, parts: nn.Module) -> None:
        super().__init__()
        self.spec, self.parts = spec, parts  # parts: tokens -> (N, f), the spec's parts side by side
        self.register_buffer("projection", torch.from_numpy(projection(spec.size, spec.expanded)))

    projection: Tensor  # (f, M)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # (N, P, d) -> (N, f), (N, M)
        parts = torch.split(self.parts(tokens), [part.size for part in self.spec.parts], dim=1)
        feature = F.normalize(torch.cat([F.normalize(self._transform(part)) for part in parts], dim=1))
        return feature, torch.relu(feature @ self.projection)

    def _transform(self, part: Tensor) -> Tensor:
        match self.spec.transform:
            case "signed-sqrt":  # pooled activations have a few large values that would decide every distance
                return torch.sign(part) * torch.sqrt(torch.abs(part))
            case "layer-norm":
                return F.layer_norm(part, part.shape[1:])
            case "identity":
                return part


class TransformerParts(nn.Module):
    """The CLS token and the mean of the patch tokens: (N, P, d) -> (N, 2d)."""

    def __init__(self, blocks: AdaptedBlocks, task: TaskTensors) -> None:
        super().__init__()
        self.blocks = blocks
        for name, tensor in task._asdict().items():
            self.register_buffer(name, tensor)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks.encode(tokens, TaskTensors(*(getattr(self, name) for name in TaskTensors._fields)))
        return torch.cat([x[:, 0], x[:, 1:].mean(dim=1)], dim=1)


class CnnParts(nn.Module):
    """The single token of a CNN, which contains all parts: (N, 1, f) -> (N, f)."""

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]


def projection(size: int, expanded: int) -> NDArray[np.float32]:
    """P (f, M), standard normal: a feature of length 1 gives values of variance 1."""
    return np.random.default_rng(PROJECTION_SEED).standard_normal((size, expanded)).astype(np.float32)
