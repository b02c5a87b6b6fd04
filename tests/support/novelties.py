"""Novelties of a running server."""

from __future__ import annotations

import io
from typing import Any

import httpx2 as httpx
import numpy as np
from PIL import Image

from models.files import sha256_bytes
from tests.support.servers import RunningServer, wait_until


def predict(server: RunningServer, data: bytes, **query: object) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/predict", content=data, params=query).json()["predictions"][0]
    return answer


def block_image(number: int, size: tuple[int, int] = (48, 36), **options: Any) -> bytes:
    """Large blocks of random colours: similar to no other seed, and hardly changed by encoding again."""
    blocks = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


def add_novelty(server: RunningServer, data: bytes, **query: object) -> str:
    """Send an image, report it if its answer is not novel, and wait until the inbox has it; returns its id."""
    answer, id = predict(server, data, **query), sha256_bytes(data)
    if not answer["novel"]:
        assert server.post("/novelties", json={"prediction_ids": [answer["id"]]}).status_code == 200
    wait_until(lambda: server.get(f"/novelties/{id}").status_code == 200)
    return id


def list_novelties(server: RunningServer, **query: object) -> list[dict[str, Any]]:
    """The novelties of all pages."""
    items: list[dict[str, Any]] = []
    while True:
        page = server.get("/novelties", params=query).json()
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        query["before"] = page["next_cursor"]


def problem_of(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["code"]
