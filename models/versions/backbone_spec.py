"""Which backbone a data folder was made with: recorded once, checked ever after."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from models.errors import BackboneError
from models.images import Preprocessing

RECORD = "backbone.json"


@dataclass(frozen=True)
class BackboneSpec:
    """The identity of a frozen backbone and of how pictures are prepared for it."""

    name: str  # timm's model name
    source: Literal["file", "hub", "wheel"]
    weights_sha256: str
    adapted_blocks: int
    dimensions: int
    preprocessing: Preprocessing

    @property
    def sha256(self) -> str:
        """What must agree for features to be comparable; where the weights came from does not matter."""
        identity = {"name": self.name, "weights": self.weights_sha256, "adapted_blocks": self.adapted_blocks}
        identity["preprocessing"] = self.preprocessing.sha256
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "preprocessing": self.preprocessing.to_dict()}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> BackboneSpec:
        return cls(**{**data, "preprocessing": Preprocessing.from_dict(data["preprocessing"])})


def recorded_backbone(folder: Path) -> BackboneSpec | None:
    """The backbone that a data folder was made with; None before its first task."""
    path = folder / RECORD
    try:
        return BackboneSpec.from_dict(json.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BackboneError(f"{path} is damaged ({error!r}): restore it, or start a new data folder") from error
