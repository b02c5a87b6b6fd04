"""Exported backbones: the same network in torch and on ONNX Runtime, images of shapes, and models learned on them."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from safetensors.torch import save_file
from timm.models import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from models.images import load_pixels
from models.inference.evidence import Features
from models.inference.gaussians import Gaussians
from models.inference.model import Adapters, Head, Model, TaskModel
from models.inference.runtime import CHUNK, Runtime
from models.network.adapted_blocks import TaskTensors, tensors_of
from models.network.backbone import Backbone, open_backbone
from models.network.export import export, roles
from tests.support.once_per_run import made_once
from tests.support.settings import learner_settings
from tests.support.tiny_model import silent_progress
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learner
from trainer.learning.memory import Samples
from trainer.learning.tokens import TokenCache

Floats = NDArray[np.float32]
TOLERANCE = 1e-4
KINDS = ("disc", "square", "stripes", "triangle", "rings", "noise")


def scene(kind: str, seed: int) -> bytes:
    """A JPEG of a shape with random place, size and colour, on a gradient with noise."""
    rng = np.random.default_rng([KINDS.index(kind), seed])
    size = int(rng.integers(64, 160))
    slope = np.linspace(0, 1, size)[:, None, None] * rng.uniform(-120, 120, 3)
    image = Image.fromarray(
        np.clip(rng.uniform(40, 215, 3) + slope + np.zeros((size, size, 3)), 0, 255).astype(np.uint8)
    )
    draw, colour = ImageDraw.Draw(image), tuple(int(c) for c in rng.integers(0, 256, 3))
    (x, y), r = rng.uniform(0.3, 0.7, 2) * size, rng.uniform(0.15, 0.3) * size
    box = (x - r, y - r, x + r, y + r)
    if kind == "disc":
        draw.ellipse(box, fill=colour)
    elif kind == "square":
        draw.rectangle(box, fill=colour)
    elif kind == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    elif kind == "stripes":
        for at in range(0, size, 12):
            draw.rectangle((at, 0, at + 5, size), fill=colour)
    elif kind == "rings":
        for part in (1.0, 0.7, 0.4):
            draw.ellipse((x - part * r, y - part * r, x + part * r, y + part * r), outline=colour, width=3)
    loud = 80 if kind == "noise" else 8
    pixels = np.clip(np.asarray(image) + rng.normal(0, loud, (size, size, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=90)
    return buffer.getvalue()


def read_scene(key: str) -> bytes:
    kind, seed = key.split("/")
    return scene(kind, int(seed))


SCENE_TASKS = [
    {kind: [f"{kind}/{seed}" for seed in range(12)] for kind in kinds}
    for kinds in (("disc", "stripes"), ("square", "triangle"))
]
SCENES = [f"{kind}/{seed}" for kind in KINDS for seed in range(1000, 1050)]


def _vit(size: int, **options: int) -> nn.Module:
    model = VisionTransformer(img_size=size, patch_size=16, num_classes=2, **options)
    vars(model)["pretrained_cfg"] = {"input_size": (3, size, size), "crop_pct": 1.0, "interpolation": "bicubic"}
    return model


@register_model
def tiny_test_vit(**_: object) -> nn.Module:
    """A ViT with three blocks, 32 dimensions and 17 tokens, which is exported in a second."""
    return _vit(64, embed_dim=32, depth=3, num_heads=2)


@dataclass(frozen=True)
class Exported:
    """A backbone in torch and on ONNX Runtime."""

    backbone: Backbone
    graphs: dict[str, bytes]
    runtime: Runtime

    @classmethod
    def of(cls, backbone: Backbone) -> Exported:
        graphs = export_once(backbone)
        return cls(backbone, graphs, Runtime(graphs, "cpu", threads=1))


def export_once(backbone: Backbone) -> dict[str, bytes]:
    """The graphs of a backbone, found by the identity in its record: an export takes seconds."""

    def write(folder: Path) -> None:
        for role, graph in export(backbone).items():
            (folder / role).write_bytes(graph)

    folder = made_once(f"graphs of {backbone.spec.sha256}", write)
    return {role: (folder / role).read_bytes() for role in roles(backbone)}


def random_backbone(folder: Path, name: str, adapted_blocks: int) -> Backbone:
    torch.manual_seed(0)
    weights = folder / "random.safetensors"
    save_file(timm.create_model(name).state_dict(), weights)
    return open_backbone(folder / "data", name, weights, adapted_blocks)


Tasks = Sequence[Mapping[str, Sequence[str]]]


def learn(backbone: Backbone, tasks: Tasks, read: Callable[[str], bytes], **more: Any) -> Model:
    given: dict[str, Any] = {"epochs": 3, "bottleneck": 16, "hold_out": 0.3, "replay_size": 16, "back_epochs": 2}
    given["networks"] = "always"  # what is compared are the networks
    settings = learner_settings(**given | more)
    learner = Learner(TokenCache(backbone, read), settings)
    model, samples = learner.empty(), Samples()
    for task in tasks:
        learned = learner.learn(model, samples, task, Checkpoint(None), silent_progress())
        model, samples = learned.model, learned.samples
    return model


def pixels_of(backbone: Backbone, images: Sequence[bytes]) -> Floats:
    return np.stack([load_pixels(data, backbone.spec.preprocessing) for data in images])


@torch.inference_mode()
def torch_tokens(backbone: Backbone, pixels: Floats) -> Tensor:
    # On a CPU, a depthwise convolution is much faster with channels last.
    images = torch.from_numpy(pixels).to(memory_format=torch.channels_last)
    return torch.cat([backbone.trunk(images[start : start + CHUNK]) for start in range(0, len(pixels), CHUNK)])


@torch.inference_mode()
def torch_features(backbone: Backbone, tokens: Tensor, task: TaskTensors) -> Floats:
    chunks = (tokens[start : start + CHUNK] for start in range(0, len(tokens), CHUNK))
    return np.concatenate([backbone.blocks(chunk, task).numpy() for chunk in chunks])


@torch.inference_mode()
def torch_frozen(backbone: Backbone, tokens: Tensor) -> tuple[Floats, Floats]:
    """The frozen feature and its random features."""
    features, expanded = zip(*(backbone.frozen(chunk) for chunk in torch.split(tokens, CHUNK)), strict=True)
    return torch.cat(features).numpy(), torch.cat(expanded).numpy()


def features_in_torch(
    backbone: Backbone, model: Model, tokens: Tensor, frozen: tuple[Floats, Floats] | None = None
) -> Features:
    tasks = [torch_features(backbone, tokens, tensors_of(task)) for task in model.tasks]
    return Features(tasks, *(frozen or torch_frozen(backbone, tokens)))


def random_task(backbone: Backbone, bottleneck: int, seed: int = 0) -> TaskModel:
    """Random adapters and norms with large effects, without statistics."""
    rng = np.random.default_rng(seed)
    a, d, b = backbone.adapters, backbone.spec.dimensions, bottleneck
    shapes = [(a, b, d), (a, b), (a, d, b), (a, d), (a + 1, d), (a + 1, d)]
    w1, b1, w2, b2, norm_w, norm_b = (rng.normal(0, 0.1, shape).astype(np.float32) for shape in shapes)
    head = Head(np.zeros((2, d), np.float32), np.zeros(2, np.float32))
    norms = (backbone.norm_w.numpy() + norm_w, backbone.norm_b.numpy() + norm_b)
    return TaskModel(
        ("x",), Adapters(w1, b1, w2, b2), *norms, head, Gaussians.fit(np.zeros((1, d)), np.zeros(1, np.int64), 1)
    )


def random_pixels(backbone: Backbone, count: int) -> Floats:
    crop = backbone.spec.preprocessing.crop
    return np.random.default_rng(count).standard_normal((count, 3, crop, crop)).astype(np.float32)
