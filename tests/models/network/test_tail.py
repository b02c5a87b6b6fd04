from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from models.inference.runtime import Runtime
from models.network.backbone import Backbone, resolve_backbone
from models.network.export import export
from models.network.tail import tail_of
from tests.support.backbones import LITE, prepared
from tests.support.tiny_model import tiny_backbone


@pytest.fixture(scope="module")
def lite() -> Backbone:
    return resolve_backbone(LITE, None, None).backbone


def random_tensors(backbone: Backbone, units: int = 5) -> dict[str, torch.Tensor]:
    assert backbone.tail is not None
    generator = torch.Generator().manual_seed(0)
    return {
        name: 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in backbone.tail.zeros(units).items()
    }


def test_with_zeros_the_tail_gives_the_feature_of_the_backbone_bit_by_bit(lite: Backbone) -> None:
    assert lite.tail is not None
    pixels = torch.from_numpy(prepared(lite, 1, 2))
    with torch.inference_mode():
        tokens, maps = lite.trunk.with_map(pixels)  # type: ignore[operator]
        z = lite.tail(maps, *lite.tail.arguments(lite.tail.zeros(3)))
    assert maps.shape == (2, 112, 14, 14)  # before the last two stages: on a pooled feature adapters can change less
    assert lite.tail.channels == (112, 192, 320)
    assert torch.equal(z, tokens[:, 0, : lite.spec.dimensions])


def test_adapters_act_on_each_position_of_the_map(lite: Backbone) -> None:
    """Maps with equal means but other positions give other features: a pooled feature cannot tell them apart."""
    assert lite.tail is not None
    tensors = random_tensors(lite)
    with torch.inference_mode():
        _, maps = lite.trunk.with_map(torch.from_numpy(prepared(lite, 1)))  # type: ignore[operator]
        one, other = (lite.tail(x, *lite.tail.arguments(tensors)) for x in (maps, maps.flip(2)))
    assert float((one - other).abs().max()) > 1e-3


def test_the_exported_tail_gives_the_same_feature(lite: Backbone, tmp_path: Path) -> None:
    assert lite.tail is not None
    runtime, tensors = Runtime(export(lite), "cpu", 1), random_tensors(lite)
    pixels = prepared(lite, 1, 2, 3)
    with torch.inference_mode():
        tokens, maps = lite.trunk.with_map(torch.from_numpy(pixels))  # type: ignore[operator]
        z = lite.tail(maps, *lite.tail.arguments(tensors)).numpy()
    computed = runtime.maps(pixels)
    np.testing.assert_allclose(computed, maps.numpy(), atol=1e-3)
    np.testing.assert_allclose(runtime.tokens(pixels), tokens.numpy(), atol=1e-3)
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    np.testing.assert_allclose(runtime.refined_features(computed, arrays), z, atol=1e-3)


def test_a_transformer_has_no_tail() -> None:
    backbone = tiny_backbone()
    assert backbone.tail is None
    assert tail_of(backbone.trunk, torch.zeros(1, 3, 2, 2)) is None
