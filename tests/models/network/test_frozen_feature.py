"""The frozen feature: its parts are timm's own outputs, its maths is that of a numpy transcription, and ONNX agrees."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from models.network.adapted_blocks import frozen_task
from models.network.backbone import Backbone, open_backbone
from models.network.frozen_feature import CnnParts, FrozenFeature, projection
from models.versions.backbone_spec import BackboneSpec, FrozenPart, FrozenSpec
from tests.support.backbones import DEIT, LITE, prepared
from tests.support.exported import TOLERANCE, Exported, Floats, random_backbone, random_pixels


def unit(x: NDArray[Any]) -> NDArray[Any]:
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def signed_sqrt(x: NDArray[Any]) -> NDArray[Any]:
    return np.sign(x) * np.sqrt(np.abs(x))


def layer_norm(x: NDArray[Any]) -> NDArray[Any]:
    return (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)


TRANSFORMS = {"signed-sqrt": signed_sqrt, "layer-norm": layer_norm, "identity": lambda x: x}


def joined(transform: str, *parts: Any) -> NDArray[Any]:
    """The frozen feature of untransformed parts, in numpy and float64."""
    return unit(np.concatenate([unit(TRANSFORMS[transform](np.asarray(part, np.float64))) for part in parts], axis=1))


@torch.inference_mode()
def frozen_feature(backbone: Backbone, pixels: Any) -> tuple[Floats, Floats]:
    feature, expanded = backbone.frozen(backbone.trunk(pixels))
    return feature.numpy(), expanded.numpy()


# The parts


@pytest.mark.parametrize("blocks", [1, 2, 12])
def test_the_parts_of_a_transformer_are_timms_cls_and_mean_patch_token(
    blocks: int, deit_file: Path, tmp_path: Path
) -> None:
    backbone = open_backbone(tmp_path, DEIT, deit_file, blocks)
    pixels = torch.from_numpy(prepared(backbone, 1, 2))
    model = timm.create_model(DEIT).eval()
    model.load_state_dict(load_file(deit_file))
    with torch.inference_mode():
        tokens = model.forward_features(pixels)
    feature, _ = frozen_feature(backbone, pixels)
    assert feature.shape == (2, 2 * 192)
    np.testing.assert_allclose(feature, joined("identity", tokens[:, 0], tokens[:, 1:].mean(1)), atol=1e-5)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        (LITE, {"pooled": 1280, "last-stage": 320, "stage-before-last": 112}),
        ("mobilenetv3_small_050", {"pooled": 1024, "last-stage": 288, "stage-before-last": 24}),
        ("resnet10t", {"pooled": 512, "stage-before-last": 256}),  # its last stage is its pooled feature
    ],
)
def test_the_parts_of_a_cnn_are_timms_pooled_outputs(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    backbone = open_backbone(tmp_path / "data", name, tmp_path / "w.safetensors")
    spec = backbone.spec.frozen
    assert {part.name: part.size for part in spec.parts} == sizes
    assert (spec.transform, spec.parts[0].size) == ("identity", backbone.spec.dimensions)
    pixels = torch.randn(2, 3, 96, 96)
    with torch.inference_mode():
        parts = {"pooled": model.forward_head(model.forward_features(pixels), pre_logits=True)}
        before, last = model.forward_intermediates(pixels, indices=2, intermediates_only=True)
        parts |= {"last-stage": last.mean((2, 3)), "stage-before-last": before.mean((2, 3))}
        tokens = backbone.trunk(pixels)
    assert tokens.shape == (2, 1, sum(sizes.values()))
    expected = [parts[part] for part in sizes]
    torch.testing.assert_close(tokens[:, 0], torch.cat(expected, dim=1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(frozen_feature(backbone, pixels)[0], joined("identity", *expected), atol=1e-4)


def test_a_cnn_whose_stages_timm_does_not_return_has_its_pooled_feature_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some models of the older releases of timm."""
    model = timm.create_model("resnet10t")
    monkeypatch.delattr(type(model), "forward_intermediates")
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    backbone = open_backbone(tmp_path / "data", "resnet10t", tmp_path / "w.safetensors")
    assert [part.name for part in backbone.spec.frozen.parts] == ["pooled"]
    assert backbone.trunk(torch.randn(1, 3, 96, 96)).shape == (1, 1, 512)


def test_a_task_of_a_cnn_sees_the_pooled_feature_only(lite0: Exported) -> None:
    tokens = torch.randn(2, 1, lite0.backbone.spec.frozen.size)
    other = tokens.clone()
    other[..., 1280:] += 1
    task = frozen_task(lite0.backbone.norm_w, lite0.backbone.norm_b)
    blocks = lite0.backbone.blocks
    assert torch.equal(blocks(tokens, task), blocks(other, task))
    assert not torch.equal(lite0.backbone.frozen(tokens)[0], lite0.backbone.frozen(other)[0])


# The maths


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_the_feature_and_its_expansion_equal_a_numpy_transcription(transform: Any) -> None:
    spec = FrozenSpec((FrozenPart("pooled", 20), FrozenPart("last-stage", 7)), transform, expanded=30)
    tokens = np.random.default_rng(0).normal(0.1, 1, (4, 1, 27)).astype(np.float32)
    feature, expanded = FrozenFeature(spec, CnnParts())(torch.from_numpy(tokens))
    expected = joined(transform, tokens[:, 0, :20], tokens[:, 0, 20:])
    np.testing.assert_allclose(feature, expected, atol=1e-6)
    p = np.random.default_rng(0).standard_normal((27, 30))
    np.testing.assert_allclose(expanded, np.maximum(expected @ p, 0), atol=1e-5)


def test_every_part_has_the_same_share_of_the_feature() -> None:
    spec = FrozenSpec((FrozenPart("pooled", 20), FrozenPart("last-stage", 5)), "identity", expanded=3)
    tokens = torch.randn(3, 1, 25)
    tokens[..., :20] *= 1000
    feature, _ = FrozenFeature(spec, CnnParts())(tokens)
    torch.testing.assert_close(feature[:, :20].norm(dim=1), torch.full((3,), 0.5**0.5))
    torch.testing.assert_close(feature.norm(dim=1), torch.ones(3))


def test_an_image_without_any_activation_has_a_finite_feature() -> None:
    spec = FrozenSpec((FrozenPart("pooled", 4), FrozenPart("last-stage", 2)), "signed-sqrt", expanded=3)
    for output in FrozenFeature(spec, CnnParts())(torch.zeros(1, 1, 6)):
        assert torch.equal(output, torch.zeros_like(output))


def test_the_expanded_values_are_of_order_one(lite0: Exported) -> None:
    _, expanded = frozen_feature(lite0.backbone, torch.from_numpy(random_pixels(lite0.backbone, 2)))
    assert expanded.shape == (2, 1024)
    assert expanded.dtype == np.float32
    assert np.isclose((expanded**2).mean(), 0.5, atol=0.1)  # relu of a standard normal variable
    assert 0.4 < (expanded > 0).mean() < 0.6


def test_the_projection_is_the_same_with_every_release_of_numpy() -> None:
    """The trainer computes it again when it opens a backbone, and the graph of a data folder contains it."""
    p = projection(384, 1024)
    assert p.shape == (384, 1024)
    np.testing.assert_allclose(p[0, :3], [0.12573022, -0.13210486, 0.64042264], rtol=1e-6)
    np.testing.assert_allclose(p[-1, -3:], [0.58070046, -0.23222588, 1.2655158], rtol=1e-6)


# The graph


@pytest.mark.parametrize("blocks", [2, 3])
def test_onnx_gives_the_frozen_feature_of_a_transformer(blocks: int, tmp_path: Path) -> None:
    assert_onnx_agrees(Exported.of(random_backbone(tmp_path, "tiny_test_vit", blocks)))


def test_onnx_gives_the_frozen_feature_of_a_cnn(lite0: Exported) -> None:
    assert_onnx_agrees(lite0)


def assert_onnx_agrees(exported: Exported) -> None:
    for count in (1, 3):
        pixels = random_pixels(exported.backbone, count)
        expected = frozen_feature(exported.backbone, torch.from_numpy(pixels))
        served = exported.runtime.frozen_features(exported.runtime.tokens(pixels))
        for one, other in zip(served, expected, strict=True):
            np.testing.assert_allclose(one, other, atol=TOLERANCE)


# The record


def test_the_frozen_feature_is_part_of_the_record_and_of_the_identity(lite0: Exported) -> None:
    spec = lite0.backbone.spec
    assert spec.frozen.size == 1280 + 320 + 112
    assert BackboneSpec.from_dict(spec.to_dict()) == spec
    changes = [{"parts": spec.frozen.parts[:2]}, {"transform": "signed-sqrt"}, {"expanded": 512}]
    others = [replace(spec, frozen=replace(spec.frozen, **change)) for change in changes]
    assert len({one.sha256 for one in (spec, *others)}) == 4


@pytest.mark.parametrize(
    "change", [{"parts": [["pooled", 3]]}, {"parts": [{"name": "logits", "size": 3}]}, {"transform": "log"}]
)
def test_an_unknown_frozen_feature_is_refused(lite0: Exported, change: dict[str, Any]) -> None:
    recorded = lite0.backbone.spec.to_dict()
    with pytest.raises(ValueError, match="frozen"):
        BackboneSpec.from_dict({**recorded, "frozen": recorded["frozen"] | change})
