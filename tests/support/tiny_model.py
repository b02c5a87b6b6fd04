"""A tiny backbone (8 x 8 images, 12 dimensions), images and a learner that learns a task in milliseconds."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from models.images import Preprocessing
from models.inference.evidence import Features
from models.inference.model import Adapters, Head, Model, SharedAdapters, TaskModel
from models.inference.one_token import EPSILON
from models.network.adapted_blocks import (
    AdaptedBlock,
    AdaptedBlocks,
    Attention,
    IdentityAttention,
    frozen_task,
    tensors_of,
)
from models.network.backbone import Backbone
from models.network.frozen_feature import CnnParts, FrozenFeature, TransformerParts
from models.network.tail import Tail
from models.storage import DataFolder
from models.versions.backbone_spec import BackboneSpec, FrozenPart, FrozenSpec, recorded_backbone
from tests.support.settings import learner_settings
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import Samples
from trainer.learning.prior import Prior
from trainer.learning.progress import Progress
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

torch.set_num_threads(1)

SIZE = 8
DIMENSIONS = 12
TOKENS = 5  # CLS and four patches
EXPANDED = 40  # random features
TINY_SETTINGS: dict[str, Any] = {
    "bottleneck": 6,
    "epochs": 2,
    "batch_size": 4,
    "min_steps": 3,
    "replay_size": 12,
    "back_epochs": 2,
    # The tests' known and novel images were chosen for the models that these draws and these weights give. The
    # product's weights are measured on photographs, and measured again with every change of the learner.
    "windowed": False,
    "back_solver": "sgd",
    "networks": "always",  # most tests are about the networks
    "prior": Prior(
        rule={
            "probability": 0.346,
            "coefficient": 0.169,
            "task_cosine": 0.58,
            "frozen_distance": 0.589,
            "frozen_cosine": 0.414,
            "output_cosine": 0.0,
            "ridge": 0.686,
        },
        novelty={
            "distance": 0.577,
            "span_distance": 0.247,
            "output_distance": 0.0,
            "cosine": 0.276,
            "cosine_gap": 0.152,
            "ridge": 0.347,
            "ridge_gap": 0.006,
            "known": 1.14,
        },
    ),
    "device": "cpu",
    "threads": 1,
    "seed": 0,
}


class TinyTrunk(nn.Module):
    """A CLS token and four projected patches of 4 x 4 pixels."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(DIMENSIONS, 3, 4, 4, generator=generator) * 0.2)
        self.register_buffer("cls", torch.randn(1, 1, DIMENSIONS, generator=generator))

    weight: Tensor
    cls: Tensor

    def forward(self, pixels: Tensor) -> Tensor:  # (N, 3, 8, 8) -> (N, 5, 12)
        patches = nn.functional.conv2d(pixels, self.weight, stride=4).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(pixels.shape[0], -1, -1), patches], dim=1)


def tiny_backbone(blocks: int = 1, heads: int = 2, seed: int = 0) -> Backbone:
    """Random frozen weights behind the real adapted blocks: attention, MLP, norms."""
    d, generator = DIMENSIONS, torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    adapted = []
    for _ in range(blocks):
        mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d)).requires_grad_(False)
        for parameter in mlp.parameters():
            parameter.copy_(random(*parameter.shape))
        adapted.append(AdaptedBlock(Attention(random(3 * d, d), random(3 * d), random(d, d), random(d), heads), mlp))
    preprocessing = Preprocessing(SIZE, SIZE, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    frozen = FrozenSpec((FrozenPart("cls", d), FrozenPart("patches", d)), "identity", expanded=EXPANDED)
    spec = BackboneSpec("tiny", "file", "0" * 64, blocks, d, preprocessing, frozen)
    norms = 2 * blocks + 1
    norm_w, norm_b = 1 + random(norms, d) / 3, random(norms, d) / 3
    network = AdaptedBlocks(adapted, 1e-6)
    feature = FrozenFeature(frozen, TransformerParts(network, frozen_task(norm_w, norm_b)))
    return Backbone(spec, TinyTrunk(generator), network, feature, norm_w, norm_b)


class TinyCnnTrunk(nn.Module):
    """One token: a pooled output and the pooled stage before it."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.register_buffer("first", torch.randn(DIMENSIONS, 3, 4, 4, generator=generator) * 0.2)
        self.register_buffer("last", torch.randn(DIMENSIONS, DIMENSIONS, 2, 2, generator=generator) * 0.3)

    first: Tensor
    last: Tensor

    def forward(self, pixels: Tensor) -> Tensor:  # (N, 3, 8, 8) -> (N, 1, 24)
        return self.with_map(pixels)[0]

    def with_map(self, pixels: Tensor) -> tuple[Tensor, Tensor]:  # -> (N, 1, 24), (N, 12, 2, 2)
        stage = torch.relu(nn.functional.conv2d(pixels, self.first, stride=4))
        return torch.cat([self.output(stage), stage.mean((2, 3))], dim=1)[:, None], stage

    def output(self, stage: Tensor) -> Tensor:
        return torch.relu(nn.functional.conv2d(stage, self.last) + 0.5).mean((2, 3))


class TinyOutput(nn.Module):
    """What follows the map of a tiny CNN."""

    def __init__(self, trunk: TinyCnnTrunk) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, stage: Tensor) -> Tensor:
        return self.trunk.output(stage)


def tiny_cnn(seed: int = 0, tail: bool = False) -> Backbone:
    """A backbone with one token per image; with `tail`, its versions have a refined feature."""
    d, blocks = DIMENSIONS, 1
    preprocessing = Preprocessing(SIZE, SIZE, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    frozen = FrozenSpec((FrozenPart("pooled", d), FrozenPart("stage-before-last", d)), "identity", expanded=EXPANDED)
    spec = BackboneSpec("tiny-cnn", "file", "1" * 64, blocks, d, preprocessing, frozen)
    shape = (2 * blocks + 1, d)
    network = AdaptedBlocks([AdaptedBlock(IdentityAttention(), nn.Identity())], EPSILON)
    trunk = TinyCnnTrunk(torch.Generator().manual_seed(seed))
    cut = Tail([], TinyOutput(trunk), [d], (d, 2, 2)) if tail else None
    norms = torch.ones(shape), torch.zeros(shape)
    return Backbone(spec, trunk, network, FrozenFeature(frozen, CnnParts()), *norms, cut)


def recorded_tiny(folder: DataFolder, *chosen: object) -> Backbone:
    """The tiny backbone that a data folder records; in place of `open_backbone`."""
    spec = recorded_backbone(folder)
    return tiny_cnn() if spec is not None and spec.is_transformer is False else tiny_backbone()


@dataclass(frozen=True)
class TinyImages:
    """Images in memory: key `<class>/<number>` gives the class's four coloured squares with noise."""

    noise: float = 20.0

    def read(self, key: str) -> bytes:
        name, number = key.rsplit("/", 1)
        colours = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 256, (2, 2, 3))
        noise = np.random.default_rng(int(number)).normal(0, self.noise, (SIZE, SIZE, 3))
        pixels = np.clip(np.kron(colours, np.ones((4, 4, 1))) + noise, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG")
        return buffer.getvalue()

    def batch(self, names: Iterable[str], count: int = 6, start: int = 0) -> dict[str, list[str]]:
        """`count` keys for each class, from number `start` on."""
        return {name: [f"{name}/{number}" for number in range(start, start + count)] for name in names}


def tiny_settings(**settings: Any) -> LearnerSettings:
    return learner_settings(**{**TINY_SETTINGS, **settings})


def tiny_learner(
    blocks: int = 1, noise: float = 20.0, cnn: bool = False, tail: bool = False, **settings: Any
) -> Learner:
    """A learner on a tiny backbone; `settings` are those of LearnerSettings and its recipe."""
    chosen, backbone = tiny_settings(**settings), tiny_cnn(tail=tail) if cnn else tiny_backbone(blocks)
    return Learner(TokenCache(backbone, TinyImages(noise).read, chosen.seed), chosen)


def features_of(learner: Learner, model: Model, keys: Sequence[str]) -> Features:
    """The features of every task's network and of the frozen backbone."""
    tasks = [learner.tokens.features(keys, tensors_of(task)) for task in model.tasks]
    refined = None if model.refined is None else learner.tokens.refined(keys, model.refined.tail)
    return Features(tasks, *learner.tokens.frozen(keys), refined=refined)


def silent_progress(task: str = "task") -> Progress:
    return Progress(task, lambda event: None)


def learn_tasks(learner: Learner, tasks: Sequence[dict[str, list[str]]]) -> list[Learned]:
    """Learn the batches in order, each on top of the previous result."""
    out: list[Learned] = []
    model, samples = learner.empty(), Samples()
    for images in tasks:
        out.append(learner.learn(model, samples, images, Checkpoint(None), silent_progress()))
        model, samples = out[-1].model, out[-1].samples
    return out


def any_tokens(seed: int = 7, scale: float = 1.0) -> Tensor:
    """Four inputs outside every training set."""
    return scale * torch.randn(4, TOKENS, DIMENSIONS, generator=torch.Generator().manual_seed(seed))


def class_tasks(counts: Sequence[int], images: int = 6) -> list[dict[str, list[str]]]:
    """Batches of new classes; `counts` are the classes per batch."""
    source, batches, first = TinyImages(), [], 0
    for count in counts:
        batches.append(source.batch([f"class {first + c}" for c in range(count)], images))
        first += count
    return batches


def bare_model(classes: Sequence[Sequence[str]], **parts: Any) -> Model:
    """A model without tensors, for code that reads only classes and decisions."""
    nothing = np.zeros((0, 0, 0), np.float32)
    adapters = Adapters(nothing, nothing, nothing, nothing)
    tasks = []
    for names in classes:
        head = Head(np.zeros((len(names) + 1, 1), np.float32), np.zeros(len(names) + 1, np.float32))
        tasks.append(TaskModel(tuple(names), adapters, nothing, nothing, head, None))  # type: ignore[arg-type]
    shared = SharedAdapters(adapters, nothing, nothing)
    return Model(shared, tuple(tasks), **{"frozen": None, "rule": None, "novelty": None, **parts})


def refining_learner(**settings: Any) -> Learner:
    """A learner on a CNN that is cut before its last stages: its versions have a refined feature."""
    return tiny_learner(cnn=True, tail=True, **settings)


def quiet_progress(events: list[str] | None = None) -> Progress:
    """Without a listener, or with a list of the phases."""
    return Progress("task", lambda event: None if events is None else events.append(event.phase))
