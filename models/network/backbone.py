"""The frozen backbone: timm's model cut into a trunk and the blocks that get adapters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from timm.data.config import resolve_model_data_config
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from models.errors import BackboneError
from models.files import sha256_bytes, sha256_file, write_durable
from models.images import Preprocessing
from models.network.adapted_blocks import AdaptedBlock, AdaptedBlocks, Attention, IdentityAttention, TaskTensors
from models.network.weights import HUB_SECONDS, check_strict, create, resolve
from models.versions.backbone_spec import RECORD, BackboneSpec, recorded_backbone


@dataclass(frozen=True)
class Backbone:
    """trunk(pixels) -> tokens, and the blocks that turn tokens into a task's feature."""

    spec: BackboneSpec
    trunk: nn.Module  # (N, 3, H, W) -> (N, P, d)
    blocks: AdaptedBlocks
    norm_w: Tensor  # (A + 1, d), the pre-trained LayerNorms that each task starts from
    norm_b: Tensor  # (A + 1, d)

    @property
    def adapters(self) -> int:
        """A: two an adapted block."""
        return 2 * self.spec.adapted_blocks

    def frozen_task(self) -> TaskTensors:
        """The backbone as it is, written as a task whose adapters do nothing: its feature is the frozen one."""
        a, d = self.adapters, self.spec.dimensions
        zeros = torch.zeros
        return TaskTensors(zeros(a, 1, d), zeros(a, 1), zeros(a, d, 1), zeros(a, d), self.norm_w, self.norm_b)


def open_backbone(
    folder: Path,
    name: str | None = None,
    weights: Path | None = None,
    adapted_blocks: int | None = None,
    hub_seconds: float = HUB_SECONDS,
) -> Backbone:
    """The backbone that `folder` records; a folder with none gets the one resolved from the other arguments."""
    spec = recorded_backbone(folder)
    if spec is None:
        return _create(folder, name, weights, adapted_blocks, hub_seconds)
    asked = {
        "OPENWORLD_BACKBONE": (name, spec.name),
        "OPENWORLD_TRAIN_ADAPTED_BLOCKS": (adapted_blocks, spec.adapted_blocks),
    }
    if weights is not None and weights.is_file():
        asked["OPENWORLD_BACKBONE_WEIGHTS"] = (sha256_file(weights), spec.weights_sha256)
    for setting, (wanted, recorded) in asked.items():
        if wanted and wanted != recorded:
            raise BackboneError(
                f"this data folder was made with {recorded}, but {setting} asks for {wanted}: what it learned holds "
                f"only for its own backbone. Unset {setting}, or use a new data folder."
            )
    file = folder / "backbone.safetensors"
    if not file.is_file() or sha256_file(file) != spec.weights_sha256:
        raise BackboneError(f"{file} is missing or changed: restore it from a backup, or start a new data folder")
    return build(spec, load_file(file))


def _create(
    folder: Path, name: str | None, file: Path | None, adapted_blocks: int | None, hub_seconds: float
) -> Backbone:
    resolved = resolve(name, file, hub_seconds)
    model = create(resolved.name)
    data = file.read_bytes() if file else save({key: value.contiguous() for key, value in resolved.state.items()})
    spec = BackboneSpec(
        name=resolved.name,
        source=resolved.source,
        weights_sha256=sha256_bytes(data),
        adapted_blocks=adapted_blocks or default_adapted_blocks(model),
        dimensions=int(getattr(model, "head_hidden_size", model.num_features)),
        preprocessing=_preprocessing(model),
    )
    backbone = build(spec, resolved.state)  # before anything is written: a backbone that cannot be cut leaves no trace
    folder.mkdir(parents=True, exist_ok=True)
    write_durable(folder / "backbone.safetensors", data)
    write_durable(folder / RECORD, json.dumps(spec.to_dict(), indent=1, sort_keys=True).encode())
    return backbone


def default_adapted_blocks(model: Any) -> int:
    """All blocks of a transformer, as in the paper; a CNN's pooled feature needs one."""
    return len(model.blocks) if isinstance(model, VisionTransformer) else 1


def _preprocessing(model: Any) -> Preprocessing:
    """The evaluation transform that the weights were made for, as timm records it."""
    config: dict[str, Any] = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    crop = int(config["input_size"][-1])
    return Preprocessing(
        resize=int(crop / config["crop_pct"]),
        crop=crop,
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def build(spec: BackboneSpec, state: dict[str, Tensor]) -> Backbone:
    """Load strictly, freeze, and cut."""
    check_strict(spec.name, state, f"{spec.name}'s weights")
    model = create(spec.name)
    model.load_state_dict(state, strict=True)
    model.eval().requires_grad_(False)
    cut = _cut_transformer if isinstance(model, VisionTransformer) else _cut_cnn
    return cut(spec, model)


class _TransformerTrunk(nn.Module):
    """Patches, positions, and the blocks that no task adapts."""

    def __init__(self, model: Any, blocks: int) -> None:
        super().__init__()
        self.patch_embed, self.pos_embed, self.cls_token = model.patch_embed, model.pos_embed, model.cls_token
        self.norm_pre, self.blocks = model.norm_pre, nn.Sequential(*model.blocks[:blocks])

    def forward(self, pixels: Tensor) -> Tensor:  # (N, 3, H, W) -> (N, P, d)
        x = self.patch_embed(pixels)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1) + self.pos_embed
        out: Tensor = self.blocks(self.norm_pre(x))
        return out


def _cut_transformer(spec: BackboneSpec, model: Any) -> Backbone:
    total, adapted = len(model.blocks), spec.adapted_blocks
    if not 1 <= adapted <= total:
        raise BackboneError(f"OPENWORLD_TRAIN_ADAPTED_BLOCKS is {adapted}, but {spec.name} has blocks 1 to {total}")
    plain = model.num_prefix_tokens == 1 and model.global_pool == "token"
    if model.cls_token is None or not plain or model.no_embed_class or model.dynamic_img_size:
        raise BackboneError(f"{spec.name} is not a ViT with one CLS token as its feature; take one like {'deit_*'!r}")
    if not all(isinstance(block, Block) for block in model.blocks) or not isinstance(model.norm, nn.LayerNorm):
        raise BackboneError(f"{spec.name} is not built of plain blocks and a final norm; take one like {'deit_*'!r}")
    blocks, norms = [], []
    for block in model.blocks[total - adapted :]:
        attention = block.attn
        if not isinstance(attention.q_norm, nn.Identity) or attention.qkv.bias is None:
            raise BackboneError(f"{spec.name} normalises queries or has no qkv bias: not supported")
        # LayerScale, where a model has it, is a diagonal after the projection: folded into it.
        gain1, gain2 = (getattr(scale, "gamma", torch.ones(spec.dimensions)) for scale in (block.ls1, block.ls2))
        mlp = block.mlp
        mlp.fc2.weight.data *= gain2[:, None]
        mlp.fc2.bias.data *= gain2
        proj_w, proj_b = attention.proj.weight * gain1[:, None], attention.proj.bias * gain1
        cut = Attention(attention.qkv.weight.data, attention.qkv.bias.data, proj_w, proj_b, attention.num_heads)
        blocks.append(AdaptedBlock(cut, mlp))
        norms += [block.norm1, block.norm2]
    norms.append(model.norm)
    weight, bias = (torch.stack([getattr(norm, part).data for norm in norms]) for part in ("weight", "bias"))
    trunk = _TransformerTrunk(model, total - adapted)
    return Backbone(spec, trunk, AdaptedBlocks(blocks, model.norm.eps), weight, bias)


class _CnnTrunk(nn.Module):
    """The whole network up to its pooled feature, as one token."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:  # (N, 3, H, W) -> (N, 1, d)
        out: Tensor = self.model.forward_head(self.model.forward_features(pixels), pre_logits=True)
        return out[:, None]


def _cut_cnn(spec: BackboneSpec, model: Any) -> Backbone:
    blocks = [AdaptedBlock(IdentityAttention(), nn.Identity()) for _ in range(spec.adapted_blocks)]
    shape = (2 * spec.adapted_blocks + 1, spec.dimensions)
    return Backbone(spec, _CnnTrunk(model), AdaptedBlocks(blocks, 1e-6), torch.ones(shape), torch.zeros(shape))
