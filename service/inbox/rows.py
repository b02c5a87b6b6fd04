"""Sightings and novelties as the columns of a row, and back."""

from __future__ import annotations

import json
import math
import sqlite3
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from service.inbox.likeness import unit
from service.inbox.records import Novelty, Sighting
from service.wire.novelties import NoveltyState


class Entry(NamedTuple):
    """What the index in memory needs of a row."""

    id: str
    state: NoveltyState
    bytes: int
    hash: int
    embedding: NDArray[np.float32] | None


class Listed(NamedTuple):
    """What ordering groups needs of a novelty."""

    id: str
    seen: int
    last_seen: float


def answer_columns(sighting: Sighting) -> dict[str, Any]:
    """The columns that each sighting renews. What is not a number goes to the novel end: JSON has no NaN."""
    score = sighting.score
    return {
        "version": sighting.version,
        "score": None if score is None or not math.isfinite(score) else float(score),
        "calibrated_score": _finite(sighting.calibrated_score, 0.0),
        "p_novel": _finite(sighting.p_novel, 1.0),
        "nearest": json.dumps([[name, _finite(share, 0.0)] for name, share in sighting.nearest]),
        "prediction_id": sighting.prediction_id,
        "client": sighting.client,
        "label": sighting.label,
    }


def _finite(value: float, otherwise: float) -> float:
    return float(value) if math.isfinite(value) else otherwise


def novelty_of(row: sqlite3.Row) -> Novelty:
    values = dict(row)
    del values["seen"], values["hash"]
    values["nearest"] = [(name, share) for name, share in json.loads(values["nearest"])]
    values["embedding"] = unpacked_embedding(values["embedding"])
    return Novelty(**values)


def packed_embedding(embedding: NDArray[np.float32] | None) -> bytes | None:
    # Only the direction is kept: of length 1, no number can overflow the half precision.
    direction = None if embedding is None else unit(embedding)
    return None if direction is None else direction.astype("<f2").tobytes()


def unpacked_embedding(blob: bytes | None) -> NDArray[np.float32] | None:
    return None if blob is None else unit(np.frombuffer(blob, dtype="<f2"))
