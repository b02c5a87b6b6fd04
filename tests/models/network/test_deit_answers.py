"""ONNX Runtime gives the answers of torch, for a transformer with any number of adapted blocks."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.accuracy.data import ImageSet
from models.inference.runtime import CHUNK
from models.network.backbone import Backbone, open_backbone
from tests.support.exported import (
    SCENE_TASKS,
    SCENES,
    Exported,
    Floats,
    features_in_torch,
    learn,
    pixels_of,
    random_backbone,
    read_scene,
    torch_frozen,
    torch_tokens,
)
from tests.support.paths import DEIT_WEIGHTS, SHARED, requires_shared
from tests.support.torch_answers import assert_same_answers, cifar10_tasks, cifar10_test, load_cifar10

without_shared = pytest.mark.skipif(SHARED.is_dir(), reason="the real DeiT of ../shared is compared instead")


@pytest.fixture(scope="module")
def cifar10() -> ImageSet:
    return load_cifar10()


@without_shared
def test_a_transformer_answers_as_in_torch(tmp_path: Path) -> None:
    exported = Exported.of(random_backbone(tmp_path, "tiny_test_vit", 3))  # all of its blocks
    # The features of all networks are compared, and some images must be novel.
    model = learn(exported.backbone, SCENE_TASKS, read_scene, cascade="off", accept=0.8)
    pixels = pixels_of(exported.backbone, [read_scene(key) for key in SCENES])
    tokens = torch_tokens(exported.backbone, pixels)
    assert_same_answers(exported, model, pixels, lambda: features_in_torch(exported.backbone, model, tokens))


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
    if adapted_blocks == 12:  # every block runs once per task: one task with few images, which accepts nearly all
        tasks = cifar10_tasks(cifar10, 8, [[0, 1, 6]])
        model = learn(exported.backbone, tasks, cifar10.read, epochs=1, accept=0.6)
    else:
        tasks = cifar10_tasks(cifar10, 12, [[0, 1], [6, 8]])
        model = learn(
            exported.backbone, tasks, cifar10.read, cascade="off"
        )  # the features of all networks are compared
    tokens = deit.tokens[adapted_blocks]
    assert_same_answers(
        exported, model, deit.pixels, lambda: features_in_torch(exported.backbone, model, tokens, deit.frozen)
    )
