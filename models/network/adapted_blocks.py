"""The adapted network: a frozen backbone whose last blocks have masked adapters; see Figure 1(b) of the paper.

    trunk(pixels) -> tokens       frozen, the same for every task, computed once per image
    blocks(tokens, task) -> z     the adapted blocks with one task's adapters and norms; z is the CLS token

The frozen feature is computed from the same tokens: see frozen_feature.py.

Tasks differ only in their `TaskTensors`, so one ONNX graph serves every task.
Shapes: N images, P tokens (1 for a CNN), d dimensions, L adapted blocks, A = 2L adapters, B bottleneck units.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.inference.model import TaskModel


class TaskTensors(NamedTuple):
    """One task's adapters with its hard masks multiplied in, and its own copy of the LayerNorms."""

    w1: Tensor  # (A, B, d)
    b1: Tensor  # (A, B)
    w2: Tensor  # (A, d, B)
    b2: Tensor  # (A, d)
    norm_w: Tensor  # (A + 1, d); the last is the final norm
    norm_b: Tensor  # (A + 1, d)


class Masks(NamedTuple):
    """Soft masks of the task in training; the tensors of a learned task contain its hard masks."""

    m1: Tensor  # (A, B)
    m2: Tensor  # (A, d)


class Attention(nn.Module):
    """Frozen self-attention; with `cls_only`, the CLS token is the only query."""

    def __init__(self, qkv_w: Tensor, qkv_b: Tensor, proj_w: Tensor, proj_b: Tensor, heads: int) -> None:
        super().__init__()
        self.heads = heads
        for name, tensor in (("qkv_w", qkv_w), ("qkv_b", qkv_b), ("proj_w", proj_w), ("proj_b", proj_b)):
            self.register_buffer(name, tensor)

    qkv_w: Tensor  # (3d, d)
    qkv_b: Tensor  # (3d,)
    proj_w: Tensor  # (d, d)
    proj_b: Tensor  # (d,)

    def forward(self, x: Tensor, cls_only: bool) -> Tensor:  # (N, P, d) -> (N, P or 1, d)
        n, p, d = x.shape[0], x.shape[1], x.shape[2]
        h = d // self.heads
        if cls_only:
            q = F.linear(x[:, :1], self.qkv_w[:d], self.qkv_b[:d]).reshape(n, 1, self.heads, h)
            kv = F.linear(x, self.qkv_w[d:], self.qkv_b[d:]).reshape(n, p, 2, self.heads, h)
            k, v = kv.unbind(2)
        else:
            q, k, v = F.linear(x, self.qkv_w, self.qkv_b).reshape(n, p, 3, self.heads, h).unbind(2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (N, heads, P, h)
        # Not F.scaled_dot_product_attention: on a CPU its backward pass is several times slower.
        weights = torch.softmax((q * h**-0.5) @ k.transpose(-2, -1), dim=-1)
        out = (weights @ v).transpose(1, 2).reshape(n, -1, d)
        return F.linear(out, self.proj_w, self.proj_b)


class IdentityAttention(nn.Module):
    """The attention of a CNN: its pooled feature is a single token."""

    def forward(self, x: Tensor, cls_only: bool) -> Tensor:
        return x


class AdaptedBlock(nn.Module):
    """A frozen transformer block with two adapters and two LayerNorms of the task."""

    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp

    def forward(
        self, x: Tensor, task: TaskTensors, index: int, eps: float, cls_only: bool, masks: Masks | None
    ) -> Tensor:
        first, second = 2 * index, 2 * index + 1
        a = self.attention(layer_norm(x, task, first, eps), cls_only)
        x = (x[:, :1] if cls_only else x) + adapter(a, task, first, masks)
        a = self.mlp(layer_norm(x, task, second, eps))
        return x + adapter(a, task, second, masks)


class AdaptedBlocks(nn.Module):
    """The L adapted blocks and the final norm: (tokens, one task's tensors) -> z (N, d).

    The token of a CNN is longer than d: what follows its pooled feature is for the frozen feature only.
    """

    def __init__(self, blocks: list[AdaptedBlock], eps: float) -> None:
        super().__init__()
        self.blocks, self.eps = nn.ModuleList(blocks), eps

    def forward(self, tokens: Tensor, task: TaskTensors, masks: Masks | None = None) -> Tensor:
        # Only the CLS token of the last block is used; its other tokens are needed as keys and values.
        return self.encode(tokens, task, masks, cls_only=True)[:, 0]

    def encode(self, tokens: Tensor, task: TaskTensors, masks: Masks | None = None, cls_only: bool = False) -> Tensor:
        """The tokens after the final norm: (N, P, d), or (N, 1, d) with `cls_only`."""
        x, last = tokens[..., : task.norm_w.shape[-1]], len(self.blocks) - 1
        for index, block in enumerate(self.blocks):
            x = block(x, task, index, self.eps, cls_only and index == last, masks)
        return layer_norm(x, task, 2 * len(self.blocks), self.eps)


class SelectedBlocks(nn.Module):
    """The adapted blocks for M pairs of an image and a task, in one call: -> z (M, d).

    The tensors of T tasks have the task as their second axis, w1 (A, T, B, d) for example. They are inputs that need
    not change between calls; `image` and `task` (M,) select the rows.
    """

    def __init__(self, blocks: AdaptedBlocks) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, tokens: Tensor, image: Tensor, task: Tensor, *stacked: Tensor) -> Tensor:
        own = TaskTensors(*(torch.index_select(tensor, 1, task) for tensor in stacked))
        out: Tensor = self.blocks(torch.index_select(tokens, 0, image), own)
        return out


def layer_norm(x: Tensor, task: TaskTensors, index: int, eps: float) -> Tensor:
    """LayerNorm number `index` with the task's weights (d,), or with those of each row's task (N, d)."""
    weight, bias = task.norm_w[index], task.norm_b[index]
    if weight.dim() == 1:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
    return F.layer_norm(x, (x.shape[-1],), eps=eps) * weight[:, None] + bias[:, None]


def adapter(a: Tensor, task: TaskTensors, index: int, masks: Masks | None) -> Tensor:
    """a + m2 * (W2 (m1 * relu(W1 a + b1)) + b2): the masks apply to the branch, not to the skip connection.

    relu(m1 * ...) would be equal, but its gradient is 0 where m1 is exactly 0: such a unit would never come back.
    """
    h = torch.relu(_linear(a, task.w1[index], task.b1[index]))
    h = h if masks is None else masks.m1[index] * h
    out = _linear(h, task.w2[index], task.b2[index])
    return a + (out if masks is None else masks.m2[index] * out)


def _linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """One layer for all rows, weight (o, i), or one per row, weight (N, o, i)."""
    return F.linear(x, weight, bias) if weight.dim() == 2 else x @ weight.transpose(1, 2) + bias[:, None]


def frozen_task(norm_w: Tensor, norm_b: Tensor) -> TaskTensors:
    """A task whose adapters add 0; with the pre-trained norms (A + 1, d), its network is the backbone itself."""
    a, d, zeros = norm_w.shape[0] - 1, norm_w.shape[1], torch.zeros
    return TaskTensors(zeros(a, 1, d), zeros(a, 1), zeros(a, d, 1), zeros(a, d), norm_w, norm_b)


def apply_masks(task: TaskTensors, m1: Tensor, m2: Tensor) -> TaskTensors:
    """The tensors of a learned task: hard masks multiplied in, unused units removed.

    They are a copy, so changes of the shared adapters by later tasks do not change the task's features in any bit. All
    adapters of the task are padded to the widest one.
    """
    width = max(1, int(m1.sum(dim=1).max()))
    # A stable sort puts the active units first and keeps their order.
    order = torch.argsort(m1, dim=1, descending=True, stable=True)[:, :width]  # (A, B')
    d = task.w1.shape[2]
    active = torch.gather(m1, 1, order)
    w1 = torch.gather(task.w1, 1, order[:, :, None].expand(-1, -1, d)) * active[:, :, None]
    w2 = torch.gather(task.w2, 2, order[:, None, :].expand(-1, d, -1)) * active[:, None, :] * m2[:, :, None]
    b1 = torch.gather(task.b1, 1, order) * active
    return TaskTensors(w1, b1, w2, task.b2 * m2, task.norm_w, task.norm_b)


def tensors_of(task: TaskModel) -> TaskTensors:
    """The arrays of a learned task as tensors."""
    a = task.adapters
    return TaskTensors(*(torch.from_numpy(x) for x in (a.w1, a.b1, a.w2, a.b2, task.norm_w, task.norm_b)))
