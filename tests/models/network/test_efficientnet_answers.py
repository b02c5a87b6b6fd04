"""ONNX Runtime gives the answers of torch, for a CNN with any number of adapted blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.inference.evidence import Features
from models.inference.model import Model
from models.inference.rules import Rule
from models.inference.runtime import CHUNK, Runtime
from models.network.backbone import Backbone, open_backbone
from models.network.export import export
from tests.support.exported import (
    SCENE_TASKS,
    SCENES,
    Exported,
    Floats,
    Tasks,
    features_in_torch,
    learn,
    pixels_of,
    read_scene,
    torch_tokens,
)
from tests.support.paths import SHARED
from tests.support.torch_answers import assert_same_answers, cifar10_tasks, cifar10_test, load_cifar10


class OneToken(nn.Module):
    """A stand-in for a trunk: tracing the blocks needs only the shape of its tokens."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.flatten(1)[:, None, : self.size]


def behind_the_same_trunk(exported: Exported, backbone: Backbone) -> Exported:
    """The backbone's blocks with the exported trunk of an equal one: the export of a CNN's trunk takes long."""
    one, other = exported.backbone.trunk.state_dict(), backbone.trunk.state_dict()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    graphs = export(replace(backbone, trunk=OneToken(backbone.spec.frozen.size), tail=None))
    graphs |= {role: exported.graphs[role] for role in ("trunk", "tail")}
    return Exported(backbone, graphs, Runtime(graphs, "cpu", threads=1))


@dataclass(frozen=True)
class Lite0InTorch:
    """The images for EfficientNet-Lite0: CIFAR-10 if ../shared exists, else scenes."""

    tasks: Tasks
    read: Callable[[str], bytes]
    pixels: Floats
    tokens: Tensor  # the same for any number of adapted blocks: the trunk of a CNN is the whole network


@pytest.fixture(scope="module")
def lite0_in_torch(lite0: Exported) -> Lite0InTorch:
    tasks, read, images = SCENE_TASKS, read_scene, [read_scene(key) for key in SCENES]
    if SHARED.is_dir():
        cifar10 = load_cifar10()
        tasks, read = cifar10_tasks(cifar10, 12, [[0, 1], [6, 8]]), cifar10.read
        images = cifar10_test(cifar10)
    pixels = pixels_of(lite0.backbone, images)
    return Lite0InTorch(tasks, read, pixels, torch_tokens(lite0.backbone, pixels))


@pytest.mark.parametrize("adapted_blocks", [1, 3])
def test_efficientnet_answers_as_in_torch(
    lite0: Exported, lite0_in_torch: Lite0InTorch, adapted_blocks: int, tmp_path: Path
) -> None:
    case, exported = lite0_in_torch, lite0
    if adapted_blocks > 1:
        exported = behind_the_same_trunk(lite0, open_backbone(tmp_path, "tf_efficientnet_lite0", None, adapted_blocks))
    model = learn(exported.backbone, case.tasks, case.read)
    # The rule of a version with a refined feature runs no network of a task, that of the paper runs all.
    every = in_torch(exported.backbone, model, case)
    assert_same_answers(exported, model, case.pixels, lambda: replace(every, tasks=[]))
    assert_same_answers(exported, replace(model, rule=Rule()), case.pixels, lambda: every)


def in_torch(backbone: Backbone, model: Model, case: Lite0InTorch) -> Features:
    """With the refined feature, which a CNN's version has."""
    assert model.uses_refined
    assert model.refined is not None
    assert backbone.tail is not None
    tail = [torch.from_numpy(np.array(model.refined.tail[name])) for name in backbone.tail.names]
    trunk: Any = backbone.trunk
    parts = []
    with torch.inference_mode():
        for start in range(0, len(case.pixels), CHUNK):
            _, maps = trunk.with_map(torch.from_numpy(case.pixels[start : start + CHUNK]))
            parts.append(backbone.tail(maps, *tail).numpy())
    return replace(features_in_torch(backbone, model, case.tokens), refined=np.concatenate(parts))
