"""Sightings as bytes, so that a server can read those of another one: JSON, embedding, image."""

from __future__ import annotations

import json
import struct
from typing import Any

import numpy as np

from service.inbox import Sighting

_SIZES = struct.Struct(">II")  # bytes of the JSON text and of the embedding; the rest is the image
_FIELDS = ("prediction_id", "version", "score", "calibrated_score", "p_novel", "client", "sha256", "label", "note")


def pack_sighting(sighting: Sighting) -> bytes:
    named: dict[str, Any] = {name: getattr(sighting, name) for name in _FIELDS}
    named["nearest"] = list(sighting.nearest)
    text = json.dumps(named).encode()
    embedding = b"" if sighting.embedding is None else sighting.embedding.astype("<f4").tobytes()
    return b"".join((_SIZES.pack(len(text), len(embedding)), text, embedding, sighting.data))


def unpack_sighting(data: bytes) -> Sighting:
    text_size, embedding_size = _SIZES.unpack_from(data)
    start = _SIZES.size + text_size
    named = json.loads(data[_SIZES.size : start])
    named["nearest"] = [(name, share) for name, share in named["nearest"]]
    embedding = np.frombuffer(data[start : start + embedding_size], "<f4") if embedding_size else None
    return Sighting(data=data[start + embedding_size :], embedding=embedding, **named)
