"""The frozen backbone: a timm model, cut into a trunk, the blocks that get adapters, and the frozen feature."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from timm.data.config import resolve_model_data_config
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from models.errors import BackboneError
from models.files import sha256_bytes, sha256_file
from models.images import Preprocessing
from models.inference.one_token import EPSILON
from models.network.adapted_blocks import AdaptedBlock, AdaptedBlocks, Attention, IdentityAttention, frozen_task
from models.network.frozen_feature import EXPANDED, CnnParts, FrozenFeature, TransformerParts
from models.network.tail import Tail, tail_of
from models.network.weights import HUB_SECONDS, load_strict, resolve
from models.storage import DataFolder, storage_of
from models.versions.backbone_spec import (
    RECORD,
    BackboneSpec,
    FrozenPart,
    FrozenSpec,
    PartName,
    recorded_backbone,
    weights_key,
)


@dataclass(frozen=True)
class Backbone:
    """A trunk, pixels -> tokens; adapted blocks, tokens -> a task's feature; and tokens -> the frozen feature."""

    spec: BackboneSpec
    trunk: nn.Module  # (N, 3, H, W) -> (N, P, d), for a CNN (N, 1, f)
    blocks: AdaptedBlocks
    frozen: FrozenFeature
    norm_w: Tensor  # (A + 1, d), the pre-trained LayerNorms that each task starts from
    norm_b: Tensor  # (A + 1, d)
    tail: Tail | None = None  # of a CNN that is cut before its last stages: map -> a version's refined feature

    @property
    def adapters(self) -> int:
        """A: two per adapted block."""
        return 2 * self.spec.adapted_blocks

    @property
    def one_token(self) -> bool:
        """Whether it is a CNN, whose pooled feature is its only token."""
        return self.spec.frozen.parts[0].name == "pooled"

    @property
    def reveals_images(self) -> bool:
        """Whether its tokens are a linear function of the pixels: a transformer with adapters in all of its blocks."""
        return isinstance(self.trunk, _TransformerTrunk) and len(self.trunk.blocks) == 0


def open_backbone(
    folder: DataFolder,
    name: str | None = None,
    weights: Path | None = None,
    adapted_blocks: int | None = None,
    hub_seconds: float = HUB_SECONDS,
) -> Backbone:
    """The backbone that `folder` records; for a folder without one, resolve and record the requested backbone."""
    storage = storage_of(folder)
    spec = recorded_backbone(storage)
    if spec is None:
        return resolve_backbone(name, weights, adapted_blocks, hub_seconds).record(storage)
    requested = {
        "OPENWORLD_BACKBONE": (name, spec.name),
        "OPENWORLD_TRAIN_ADAPTED_BLOCKS": (adapted_blocks, spec.adapted_blocks),
    }
    if weights is not None and weights.is_file():
        requested["OPENWORLD_BACKBONE_WEIGHTS"] = (sha256_file(weights), spec.weights_sha256)
    for setting, (value, recorded) in requested.items():
        if value and value != recorded:
            raise BackboneError(
                f"the data folder {storage.location('')} was made with {recorded}, but {setting} is {value}: "
                f"unset {setting}, or use a new data folder, because a model works with its own backbone only"
            )
    key = weights_key(storage, spec.weights_sha256)
    try:
        file = storage.local_path(key)
        intact = sha256_file(file) == spec.weights_sha256
    except FileNotFoundError:
        intact = False
    if not intact:
        place = storage.location(key)
        raise BackboneError(f"{place} is missing or changed: restore it from a backup, or start a new data folder")
    return _cut(spec, load_strict(spec.name, load_file(file), str(file)))


@dataclass(frozen=True)
class ResolvedBackbone:
    """The backbone for a new data folder, which does not record it yet."""

    backbone: Backbone
    weights: bytes  # a safetensors file

    def record(self, folder: DataFolder) -> Backbone:
        """Make it the backbone of the folder. If another trainer was faster, its backbone is that of the folder."""
        storage, spec = storage_of(folder), self.backbone.spec
        storage.put(weights_key(storage, spec.weights_sha256), self.weights)
        record = json.dumps(spec.to_dict(), indent=1, sort_keys=True).encode()
        if not storage.put_if_absent(RECORD, record) and storage.get(RECORD) != record:
            return open_backbone(storage)
        return self.backbone


def resolve_backbone(
    name: str | None, file: Path | None, adapted_blocks: int | None, hub_seconds: float = HUB_SECONDS
) -> ResolvedBackbone:
    """The requested backbone with its weights. Writes nothing: a model that cannot be cut leaves no files."""
    resolved = resolve(name, file, hub_seconds)
    model = load_strict(resolved.name, resolved.state, str(file or resolved.name))
    data = file.read_bytes() if file else save({key: value.contiguous() for key, value in resolved.state.items()})
    preprocessing, dimensions = _preprocessing(model), int(getattr(model, "head_hidden_size", model.num_features))
    spec = BackboneSpec(
        name=resolved.name,
        source=resolved.source,
        weights_sha256=sha256_bytes(data),
        # All blocks of a transformer, as in the paper; a CNN has only its pooled feature to adapt.
        adapted_blocks=adapted_blocks or (len(model.blocks) if isinstance(model, VisionTransformer) else 1),
        dimensions=dimensions,
        preprocessing=preprocessing,
        frozen=_frozen_spec(model, dimensions, preprocessing.crop),
    )
    return ResolvedBackbone(_cut(spec, model), data)


def _preprocessing(model: Any) -> Preprocessing:
    """The evaluation transform of the weights, as timm records it, but with the whole short side of an image.

    timm crops the centre, which suits the data set that the weights were trained on. People teach images that are not
    centred in the same way: accuracy and AUC are higher without the crop (benchmarks/accuracy/crop.py).
    """
    config: dict[str, Any] = resolve_model_data_config(model)  # type: ignore[no-untyped-call]
    crop = int(config["input_size"][-1])
    return Preprocessing(
        resize=crop,
        crop=crop,
        interpolation=config["interpolation"],
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
    )


def _frozen_spec(model: Any, dimensions: int, crop: int) -> FrozenSpec:
    if isinstance(model, VisionTransformer):
        return FrozenSpec((FrozenPart("cls", dimensions), FrozenPart("patches", dimensions)), "identity", EXPANDED)
    model.eval()
    with torch.inference_mode():
        outputs, _ = _pooled_outputs(model, torch.randn(1, 3, crop, crop, generator=torch.Generator().manual_seed(0)))
    pooled = outputs.pop("pooled")
    parts = [FrozenPart("pooled", pooled.shape[1])]
    for name, out in outputs.items():
        # The pooled feature of a ResNet is its pooled last stage: one part, not two.
        if out.shape != pooled.shape or not torch.allclose(out, pooled):
            parts.append(FrozenPart(name, out.shape[1]))
    return FrozenSpec(tuple(parts), "identity", EXPANDED)


def _cut(spec: BackboneSpec, model: Any) -> Backbone:
    """Freeze the model and cut it into trunk and blocks."""
    model.eval().requires_grad_(False)
    return (_cut_transformer if isinstance(model, VisionTransformer) else _cut_cnn)(spec, model)


class _TransformerTrunk(nn.Module):
    """Patch and position embeddings, and the blocks without adapters."""

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
        raise BackboneError(f"{spec.name} is not a ViT with one CLS token as its feature: use one like 'deit_*'")
    if not all(isinstance(block, Block) for block in model.blocks) or not isinstance(model.norm, nn.LayerNorm):
        raise BackboneError(f"{spec.name} does not consist of plain blocks and a final norm: use one like 'deit_*'")
    blocks, norms = [], []
    for block in model.blocks[total - adapted :]:
        attention = block.attn
        if not isinstance(attention.q_norm, nn.Identity) or attention.qkv.bias is None:
            raise BackboneError(f"{spec.name} normalises queries or has no qkv bias: use one like 'deit_*'")
        # LayerScale, if present, is a diagonal matrix after the projection: multiply it into the projection.
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
    adapted_blocks = AdaptedBlocks(blocks, model.norm.eps)
    frozen = FrozenFeature(spec.frozen, TransformerParts(adapted_blocks, frozen_task(weight, bias)))
    return Backbone(spec, _TransformerTrunk(model, total - adapted), adapted_blocks, frozen, weight, bias)


class _CnnTrunk(nn.Module):
    """The whole network up to its pooled feature, which becomes one token together with its pooled stages."""

    def __init__(self, model: Any, parts: Sequence[PartName]) -> None:
        super().__init__()
        self.model, self.parts = model, parts

    def forward(self, pixels: Tensor) -> Tensor:  # (N, 3, H, W) -> (N, 1, f)
        return self.with_map(pixels)[0]

    def with_map(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # (N, 3, H, W) -> (N, 1, f), (N, c, h, w)
        """Also the map that the tail starts from, the output of the stage before the last."""
        outputs, before = _pooled_outputs(self.model, pixels)
        return torch.cat([outputs[name] for name in self.parts], dim=1)[:, None], before


def _pooled_outputs(model: Any, pixels: Tensor) -> tuple[dict[PartName, Tensor], Tensor]:
    """The vectors that a CNN gives as parts of the frozen feature, and the output of the stage before the last.

    Some of timm's CNNs do not return their stages: they have one part, and an empty map.
    """
    if not hasattr(model, "forward_intermediates"):
        pooled = model.forward_head(model.forward_features(pixels), pre_logits=True)
        return {"pooled": pooled}, pixels.new_zeros(len(pixels), 0, 0, 0)
    features, (before, last) = model.forward_intermediates(pixels, indices=2)
    pooled = model.forward_head(features, pre_logits=True)
    stages: dict[PartName, Tensor] = {"last-stage": last.mean((2, 3)), "stage-before-last": before.mean((2, 3))}
    return {"pooled": pooled, **stages}, before


def _cut_cnn(spec: BackboneSpec, model: Any) -> Backbone:
    blocks = [AdaptedBlock(IdentityAttention(), nn.Identity()) for _ in range(spec.adapted_blocks)]
    shape = (2 * spec.adapted_blocks + 1, spec.dimensions)
    trunk = _CnnTrunk(model, [part.name for part in spec.frozen.parts])
    frozen = FrozenFeature(spec.frozen, CnnParts())
    crop = spec.preprocessing.crop
    with torch.inference_mode():
        _, before = trunk.with_map(torch.zeros(1, 3, crop, crop))
    return Backbone(
        spec,
        trunk,
        AdaptedBlocks(blocks, EPSILON),
        frozen,
        torch.ones(shape),
        torch.zeros(shape),
        tail_of(model, before),
    )
