"""Backbones in temporary data folders, and their features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from models.errors import BackboneError
from models.images import read_image
from models.network.adapted_blocks import TaskTensors, frozen_task
from models.network.backbone import Backbone, open_backbone
from tests.support.images import make_image

DEIT = "deit_tiny_patch16_224"
LITE = "tf_efficientnet_lite0"


def write_random_deit(path: Path) -> Path:
    """Weights of a DeiT-Ti, every tensor random: norms of ones would hide a missing norm."""
    torch.manual_seed(0)
    state = timm.create_model(DEIT).state_dict()
    save_file({key: value + 0.02 * torch.randn_like(value) for key, value in state.items()}, path)
    return path


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def refused(tmp_path: Path, *asked: Any, **options: Any) -> str:
    """The message of a BackboneError; no data folder may be created."""
    with pytest.raises(BackboneError) as caught:
        open_backbone(tmp_path / "data", *asked, **options)
    assert not (tmp_path / "data").exists()
    return str(caught.value)


def prepared(backbone: Backbone, *seeds: int) -> Any:
    images = [read_image(make_image(seed, (300, 260))) for seed in seeds]
    return np.stack([backbone.spec.preprocessing.apply(image) for image in images])


def feature(backbone: Backbone, pixels: Any, task: TaskTensors | None = None) -> Any:
    with torch.inference_mode():
        return backbone.blocks(backbone.trunk(pixels), task or frozen_task(backbone.norm_w, backbone.norm_b))


def timms_feature(name: str, file: Path, pixels: Any) -> Any:
    model = timm.create_model(name).eval()
    model.load_state_dict(load_file(file))
    with torch.inference_mode():
        return model.forward_head(model.forward_features(pixels), pre_logits=True)
