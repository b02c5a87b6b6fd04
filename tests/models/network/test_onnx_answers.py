"""ONNX Runtime gives the answers of torch, for transformers and CNNs and any number of adapted blocks."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.accuracy.data import ImageSet
from models.inference.answer import answer
from models.inference.evidence import Features
from models.inference.model import Model
from models.inference.runtime import CHUNK, Runtime
from models.network.backbone import Backbone, open_backbone
from models.network.export import export
from tests.support.exported import (
    SCENE_TASKS,
    SCENES,
    TOLERANCE,
    Exported,
    Floats,
    Tasks,
    features_in_torch,
    learn,
    pixels_of,
    random_backbone,
    read_scene,
    torch_frozen,
    torch_tokens,
)
from tests.support.paths import DEIT_WEIGHTS, SHARED, requires_shared

without_shared = pytest.mark.skipif(SHARED.is_dir(), reason="the real DeiT of ../shared is compared instead")


@pytest.fixture(scope="module")
def cifar10() -> ImageSet:
    return ImageSet.load(SHARED / "data" / "cifar10.safetensors")


def difference(one: Features, other: Features) -> float:
    first, second = ((*features.tasks, features.frozen, features.expanded) for features in (one, other))
    pairs = zip(first, second, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def assert_same_answers(exported: Exported, model: Model, pixels: Floats, in_torch: Callable[[], Features]) -> None:
    """Features within the tolerance, and the same label and novel flag for every image."""
    assert len(pixels) >= 300
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(in_torch)
        served = exported.runtime.features(model, pixels)
        trained = waiting.result()
    assert difference(trained, served) < TOLERANCE
    ours, theirs = answer(model, model.evidence(served)), answer(model, model.evidence(trained))
    assert [(a.label, a.novel) for a in ours] == [(a.label, a.novel) for a in theirs]
    # Both known and novel answers, so that the comparison is meaningful.
    assert {a.novel for a in ours} == {True, False}
    assert len({a.label for a in ours}) > 2


def assert_answers_as_in_torch(exported: Exported, model: Model, images: Sequence[bytes]) -> None:
    backbone = exported.backbone
    pixels = pixels_of(backbone, images)
    assert_same_answers(
        exported, model, pixels, lambda: features_in_torch(backbone, model, torch_tokens(backbone, pixels))
    )


@without_shared
def test_a_transformer_answers_as_in_torch(tmp_path: Path) -> None:
    exported = Exported.of(random_backbone(tmp_path, "short_test_deit", 2))
    model = learn(exported.backbone, SCENE_TASKS, read_scene)
    assert_answers_as_in_torch(exported, model, [read_scene(key) for key in SCENES])


def cifar10_tasks(images: ImageSet, per_class: int, tasks: Sequence[Sequence[int]]) -> Tasks:
    rng = np.random.default_rng(0)
    return [{images.classes[c]: images.pick("train", c, per_class, rng) for c in task} for task in tasks]


def cifar10_test(images: ImageSet) -> list[bytes]:
    rng = np.random.default_rng(1)
    return [images.read(key) for c in range(10) for key in images.pick("test", c, 30, rng)]


def real_deit(folder: Path, adapted_blocks: int) -> Backbone:
    return open_backbone(folder / str(adapted_blocks), "deit_tiny_patch16_224", DEIT_WEIGHTS, adapted_blocks)


@dataclass(frozen=True)
class DeitInTorch:
    """One pass of the real DeiT over the test images, with its tokens at each cut."""

    pixels: Floats
    tokens: dict[int, Tensor]  # by the number of adapted blocks
    frozen: tuple[Floats, Floats]  # the frozen feature and its random features: the same wherever the network is cut


@pytest.fixture(scope="module")
def deit(tmp_path_factory: pytest.TempPathFactory, cifar10: ImageSet) -> DeitInTorch:
    folder = tmp_path_factory.mktemp("deit")
    all_adapted, last_adapted = real_deit(folder, 12), real_deit(folder, 1)
    pixels = pixels_of(last_adapted, cifar10_test(cifar10))
    steps = last_adapted.trunk.blocks
    assert isinstance(steps, nn.Sequential)
    tokens = {12: torch_tokens(all_adapted, pixels)}
    with torch.inference_mode():
        tokens[2] = torch.cat([steps[:10](chunk) for chunk in torch.split(tokens[12], CHUNK)])
        tokens[1] = torch.cat([steps[10:](chunk) for chunk in torch.split(tokens[2], CHUNK)])
    return DeitInTorch(pixels, tokens, torch_frozen(last_adapted, tokens[1]))


@requires_shared
@pytest.mark.parametrize("adapted_blocks", [1, 2, 12])
def test_deit_answers_as_in_torch_on_real_images(
    deit: DeitInTorch, cifar10: ImageSet, adapted_blocks: int, tmp_path: Path
) -> None:
    exported = Exported.of(real_deit(tmp_path, adapted_blocks))
    if adapted_blocks == 12:  # every block runs once per task: one task with few images
        model = learn(exported.backbone, cifar10_tasks(cifar10, 8, [[0, 1, 6]]), cifar10.read, epochs=1)
    else:
        model = learn(exported.backbone, cifar10_tasks(cifar10, 12, [[0, 1], [6, 8]]), cifar10.read)
    tokens = deit.tokens[adapted_blocks]
    assert_same_answers(
        exported, model, deit.pixels, lambda: features_in_torch(exported.backbone, model, tokens, deit.frozen)
    )


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
    graphs = export(replace(backbone, trunk=OneToken(backbone.spec.frozen.size)))
    graphs["trunk"] = exported.graphs["trunk"]
    return Exported(backbone, graphs, Runtime(graphs, "cpu", threads=1))


@dataclass(frozen=True)
class Lite0InTorch:
    """The images for EfficientNet-Lite0: CIFAR-10 if ../shared exists, else scenes."""

    tasks: Tasks
    read: Callable[[str], bytes]
    pixels: Floats
    tokens: Tensor  # the same for any number of adapted blocks: the trunk of a CNN is the whole network


@pytest.fixture(scope="module")
def lite0_in_torch(lite0: Exported, request: pytest.FixtureRequest) -> Lite0InTorch:
    tasks, read, images = SCENE_TASKS, read_scene, [read_scene(key) for key in SCENES]
    if SHARED.is_dir():
        cifar10: ImageSet = request.getfixturevalue("cifar10")
        tasks, read = cifar10_tasks(cifar10, 12, [[0, 1], [6, 8]]), cifar10.read
        images = cifar10_test(cifar10)
    pixels = pixels_of(lite0.backbone, images)
    return Lite0InTorch(tasks, read, pixels, torch_tokens(lite0.backbone, pixels))


@pytest.mark.parametrize("adapted_blocks", [1, 2, 12])
def test_efficientnet_answers_as_in_torch(
    lite0: Exported, lite0_in_torch: Lite0InTorch, adapted_blocks: int, tmp_path: Path
) -> None:
    case, exported = lite0_in_torch, lite0
    if adapted_blocks > 1:
        exported = behind_the_same_trunk(lite0, open_backbone(tmp_path, "tf_efficientnet_lite0", None, adapted_blocks))
    model = learn(exported.backbone, case.tasks, case.read)
    assert_same_answers(exported, model, case.pixels, lambda: features_in_torch(exported.backbone, model, case.tokens))
