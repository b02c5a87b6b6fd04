"""The backbone of a data folder: its record, and the cut into trunk and blocks."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import ParallelThingsBlock

from models.errors import BackboneError
from models.network.backbone import Backbone, open_backbone, resolve_backbone
from models.storage import open_storage
from models.versions.backbone_spec import BackboneSpec
from tests.support.backbones import DEIT, LITE, feature, prepared, refused, timms_feature
from tests.support.object_stores import new_bucket
from tests.support.paths import DEIT_WEIGHTS, requires_shared

# The record in the data folder


def test_a_folder_opens_with_its_recorded_backbone(deit_folder: Path, deit_file: Path) -> None:
    plain, requested = open_backbone(deit_folder), open_backbone(deit_folder, DEIT, deit_file, 2)
    assert plain.spec == requested.spec
    assert plain.spec.adapted_blocks == 2
    pixels = torch.from_numpy(prepared(plain, 1))
    assert torch.equal(feature(plain, pixels), feature(requested, pixels))


@pytest.mark.parametrize(
    ("requested", "setting"),
    [
        ({"name": "deit_small_patch16_224"}, "OPENWORLD_BACKBONE is deit_small_patch16_224"),
        ({"adapted_blocks": 3}, "OPENWORLD_TRAIN_ADAPTED_BLOCKS is 3"),
    ],
)
def test_another_backbone_than_the_recorded_one_is_refused(
    deit_folder: Path, requested: dict[str, Any], setting: str
) -> None:
    with pytest.raises(BackboneError, match=setting):
        open_backbone(deit_folder, **requested)


def test_other_weights_than_the_recorded_ones_are_refused(deit_folder: Path, deit_file: Path, tmp_path: Path) -> None:
    state = load_file(deit_file)
    state["norm.bias"] += 1e-6
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(BackboneError, match="OPENWORLD_BACKBONE_WEIGHTS is"):
        open_backbone(deit_folder, DEIT, tmp_path / "other.safetensors")


@pytest.mark.parametrize("change", ["flipped", "cut", "gone"])
def test_a_changed_weights_file_in_the_folder_is_refused(deit_folder: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "backbone.json").write_bytes((deit_folder / "backbone.json").read_bytes())
    data = bytearray((deit_folder / "backbone.safetensors").read_bytes())
    data[-1] ^= 1
    if change != "gone":
        (tmp_path / "backbone.safetensors").write_bytes(data[:-10] if change == "cut" else data)
    with pytest.raises(BackboneError, match="missing or changed: restore it from a backup"):
        open_backbone(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:-20],
        lambda text: "[]",
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "dimensions"}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "preprocessing"}),
        lambda text: json.dumps({k: v for k, v in json.loads(text).items() if k != "frozen"}),
        lambda text: json.dumps(json.loads(text) | {"surprise": 1}),
        lambda text: json.dumps(json.loads(text) | {"preprocessing": {"resize": "wide"}}),
    ],
    ids=[
        "empty",
        "cut",
        "a list",
        "no dimensions",
        "no preprocessing",
        "no frozen feature",
        "a field too many",
        "no number",
    ],
)
def test_a_damaged_record_is_a_backbone_error_with_a_remedy(
    deit_folder: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    (tmp_path / "backbone.json").write_text(damage((deit_folder / "backbone.json").read_text()))
    with pytest.raises(BackboneError, match=r"backbone\.json is damaged .*: restore it, or start a new data folder"):
        open_backbone(tmp_path)


def test_the_preprocessing_is_the_models_own_and_is_recorded(deit_folder: Path, tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    save_file(timm.create_model(name).state_dict(), tmp_path / "vit.safetensors")
    vit = open_backbone(tmp_path / "vit", name, tmp_path / "vit.safetensors").spec
    deit = open_backbone(deit_folder).spec
    assert vit.preprocessing.mean == vit.preprocessing.std == (0.5, 0.5, 0.5)
    assert deit.preprocessing.mean == pytest.approx((0.485, 0.456, 0.406))
    assert deit.preprocessing.std == pytest.approx((0.229, 0.224, 0.225))
    # The whole short side; timm's own transform would resize to 248 and crop.
    assert (deit.preprocessing.crop, deit.preprocessing.resize, vit.preprocessing.resize) == (224, 224, 224)
    for spec, where in ((vit, tmp_path / "vit"), (deit, deit_folder)):
        recorded = json.loads((where / "backbone.json").read_text())
        assert recorded["preprocessing"]["mean"] == list(spec.preprocessing.mean)
        assert BackboneSpec.from_dict(recorded) == spec
        assert BackboneSpec.from_dict(recorded).sha256 == spec.sha256


def test_a_folder_keeps_the_preprocessing_that_it_was_made_with(deit_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(deit_folder, tmp_path / "data")
    record = tmp_path / "data" / "backbone.json"
    cropped = json.loads(record.read_text())
    cropped["preprocessing"]["resize"] = 248  # as an earlier release recorded it
    record.write_text(json.dumps(cropped))
    spec = open_backbone(tmp_path / "data").spec
    assert (spec.preprocessing.resize, spec.preprocessing.crop) == (248, 224)
    assert spec.sha256 != open_backbone(deit_folder).spec.sha256  # features of both cannot be mixed


# Models that cannot be cut


@pytest.mark.parametrize("blocks", [13, 100])
def test_more_adapted_blocks_than_the_model_has_are_refused(deit_file: Path, tmp_path: Path, blocks: int) -> None:
    message = refused(tmp_path, DEIT, deit_file, blocks)
    assert f"OPENWORLD_TRAIN_ADAPTED_BLOCKS is {blocks}, but {DEIT} has blocks 1 to 12" in message


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_a_transformer_needs_one_cls_token(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    if model.num_prefix_tokens == 1:  # its patch embedding is a CNN
        assert open_backbone(tmp_path / "data", name, tmp_path / "w.safetensors", 1).spec.name == name
    else:
        assert "is not a ViT with one CLS token" in refused(tmp_path, name, tmp_path / "w.safetensors")


CREATE = timm.create_model
VARIANTS: dict[str, dict[str, Any]] = {
    "queries are normalised": {"qk_norm": True},
    "no qkv bias": {"qkv_bias": False},
    "average pooled": {"global_pool": "avg"},
    "no position for CLS": {"no_embed_class": True},
    "register tokens": {"reg_tokens": 4},
    "any image size": {"dynamic_img_size": True},
    "parallel blocks": {"block_fn": ParallelThingsBlock},
    "no final norm": {"final_norm": False},
}


def cut_variant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Backbone:
    """A small ViT with other options, by DeiT's name."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 2, **changes}
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False: CREATE(name, **small))
    save_file(timm.create_model(DEIT).state_dict(), tmp_path / "w.safetensors")
    return open_backbone(tmp_path / "data", DEIT, tmp_path / "w.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_unsupported_transformer_is_refused(variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BackboneError, match=DEIT):
        cut_variant(tmp_path, monkeypatch, **VARIANTS[variant])
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("changes", [{"init_values": 0.1}, {"pre_norm": True}, {"num_classes": 0}, {"img_size": 64}])
def test_a_supported_variant_gives_timms_own_feature(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    backbone = cut_variant(tmp_path, monkeypatch, **changes)
    size = changes.get("img_size", 224)
    pixels = torch.randn(2, 3, size, size)
    expected = timms_feature(DEIT, tmp_path / "w.safetensors", pixels)
    torch.testing.assert_close(feature(backbone, pixels), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "mobilenetv3_small_050"])
def test_the_dimensions_of_a_cnn_are_those_of_its_feature(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    backbone = open_backbone(tmp_path / "data", name, tmp_path / "w.safetensors")
    assert feature(backbone, torch.zeros(1, 3, 64, 64)).shape == (1, backbone.spec.dimensions)


# The cut is exact


@pytest.mark.parametrize("blocks", [1, 2, 12])
@pytest.mark.parametrize("kind", ["random", pytest.param("trained", marks=requires_shared)])
def test_the_frozen_task_gives_timms_own_feature(kind: str, blocks: int, deit_file: Path, tmp_path: Path) -> None:
    file = deit_file if kind == "random" else DEIT_WEIGHTS
    backbone = open_backbone(tmp_path, DEIT, file, blocks)
    assert backbone.norm_w.shape == (2 * blocks + 1, 192)
    pixels = torch.from_numpy(prepared(backbone, 1, 2))
    torch.testing.assert_close(feature(backbone, pixels), timms_feature(DEIT, file, pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [DEIT, LITE])
def test_the_backbone_is_frozen(name: str, deit_folder: Path, tmp_path: Path) -> None:
    backbone = open_backbone(deit_folder if name == DEIT else tmp_path, name)
    for module in (backbone.trunk, backbone.blocks, backbone.frozen):
        assert not any(parameter.requires_grad for parameter in module.parameters())
        stochastic = [part for part in module.modules() if isinstance(part, torch.nn.Dropout | torch.nn.BatchNorm2d)]
        assert not any(part.training for part in stochastic)


def test_the_offline_default_gives_finite_features_that_differ_between_images(tmp_path: Path) -> None:
    backbone = open_backbone(tmp_path, LITE)
    assert (backbone.spec.dimensions, backbone.spec.adapted_blocks) == (1280, 1)
    pixels = torch.from_numpy(prepared(backbone, 1, 2))
    z = feature(backbone, pixels)
    assert z.shape == (2, 1280)
    assert torch.isfinite(z).all()
    assert (z[0] - z[1]).abs().max() > 0.01
    assert torch.equal(z, feature(open_backbone(tmp_path), pixels))


# On an object store


def test_another_machine_opens_the_backbone_that_a_trainer_recorded(seaweedfs: int, tmp_path: Path) -> None:
    url = new_bucket()
    made = open_backbone(open_storage(tmp_path / "first", url), "tiny_test_vit", random_weights(tmp_path, 0), 2)
    opened = open_backbone(open_storage(tmp_path / "second", url))
    assert opened.spec == made.spec
    assert [path.name for path in (tmp_path / "second" / "objects" / "backbone").iterdir()] == [
        f"{made.spec.weights_sha256}.safetensors"
    ]


def test_of_two_trainers_that_choose_different_weights_the_first_record_decides(seaweedfs: int, tmp_path: Path) -> None:
    url = new_bucket()
    choices = [resolve_backbone("tiny_test_vit", random_weights(tmp_path, seed), 2) for seed in (0, 1)]
    first, second = (
        choice.record(open_storage(tmp_path / str(machine), url)) for machine, choice in enumerate(choices)
    )
    assert choices[0].backbone.spec != choices[1].backbone.spec
    assert first.spec == second.spec == choices[0].backbone.spec


def random_weights(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    path = folder / f"{seed}.safetensors"
    save_file(timm.create_model("tiny_test_vit").state_dict(), path)
    return path
