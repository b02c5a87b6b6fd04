"""The backbone that a data folder is made with: recorded once in `backbone.json`, checked whenever it is opened."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from models.errors import BackboneError
from models.images import Preprocessing
from models.storage import DataFolder, Storage, StoreUnavailable, storage_of
from models.versions.manifest import field_errors

RECORD = "backbone.json"

# Of a transformer: the CLS token and the mean of the patch tokens, both after the final norm. Of a CNN: its pooled
# feature and the pooled outputs of its last two stages.
PartName = Literal["cls", "patches", "pooled", "last-stage", "stage-before-last"]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FrozenPart:
    """A part of the frozen feature: one output of the backbone, pooled to a vector."""

    name: PartName
    size: int


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class FrozenSpec:
    """The frozen feature of a backbone (models/network/frozen_feature.py)."""

    parts: tuple[FrozenPart, ...]
    transform: Literal["signed-sqrt", "layer-norm", "identity"]  # of every part, before it is scaled to length 1
    expanded: int  # M, the number of random features

    @property
    def size(self) -> int:
        """f, the size of the feature."""
        return sum(part.size for part in self.parts)

    @property
    def output_size(self) -> int:
        """Of the first part, the backbone's output: its pooled feature or its CLS token."""
        return self.parts[0].size


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class BackboneSpec:
    """The identity of a frozen backbone and the preprocessing of its images."""

    name: str  # timm's model name
    source: Literal["file", "hub", "wheel"]
    weights_sha256: str
    adapted_blocks: int
    dimensions: int
    preprocessing: Preprocessing
    frozen: FrozenSpec

    @property
    def sha256(self) -> str:
        """Equal for backbones whose features are comparable; independent of the source of the weights."""
        identity = {
            "name": self.name,
            "weights": self.weights_sha256,
            "adapted_blocks": self.adapted_blocks,
            "preprocessing": self.preprocessing.sha256,
            "frozen": self.to_dict()["frozen"],
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    @property
    def is_transformer(self) -> bool:
        """Whether an image is many tokens, and not the pooled feature of a CNN."""
        return self.frozen.parts[0].name == "cls"

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = TypeAdapter(BackboneSpec).dump_python(self, mode="json")
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BackboneSpec:
        """The inverse of `to_dict`; ValueError for a missing, unknown or invalid value."""
        try:
            return TypeAdapter(BackboneSpec).validate_python(data)
        except ValidationError as error:
            raise ValueError(field_errors(error)) from error


def weights_key(storage: Storage, sha256: str) -> str:
    """Where the weights are stored. On a shared storage two trainers may choose different ones: the record decides."""
    return f"backbone/{sha256}.safetensors" if storage.shared else "backbone.safetensors"


def recorded_backbone(folder: DataFolder) -> BackboneSpec | None:
    """The backbone of a data folder; None before its first task."""
    storage = storage_of(folder)
    try:
        return BackboneSpec.from_dict(json.loads(storage.get(RECORD)))
    except FileNotFoundError:
        return None
    except StoreUnavailable:
        raise
    except (OSError, ValueError) as error:
        place = storage.location(RECORD)
        raise BackboneError(f"{place} is damaged ({error}): restore it, or start a new data folder") from error
