"""The common way to serve a model: FastAPI with a torch model, one image per request.

Weights, image reader and rules are those of the service, so the answers are the same. `SERVING_HANDLER` selects the
handler: `async def`, which computes on the event loop, or `def`, which FastAPI runs in its thread pool.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import uvicorn
from fastapi import Body, FastAPI, Request

from models.images import load_pixels
from models.inference.answer import answer
from models.inference.evidence import Features
from models.inference.stored_model import read_model
from models.network.adapted_blocks import tensors_of
from models.network.backbone import open_backbone
from models.versions.store import VersionStore


class TorchRecogniser:
    """Answers one image at a time."""

    def __init__(self, data: Path) -> None:
        self._model, self._preprocessing = read_model(VersionStore(data).load())
        self._backbone = open_backbone(data)
        self._tasks = [tensors_of(task) for task in self._model.tasks]

    @torch.inference_mode()
    def answer(self, image: bytes) -> dict[str, Any]:
        pixels = torch.from_numpy(load_pixels(image, self._preprocessing))[None]
        tokens = self._backbone.trunk(pixels)
        tasks = [self._backbone.blocks(tokens, task).numpy() for task in self._tasks]
        features = Features(tasks, *(part.numpy() for part in self._backbone.frozen(tokens)))
        return answer(self._model, self._model.evidence(features))[0].to_dict()


def create_app(data: Path, handler: str) -> FastAPI:
    app = FastAPI()
    recogniser = TorchRecogniser(data)

    async def on_the_loop(request: Request) -> dict[str, Any]:
        return recogniser.answer(await request.body())

    def in_threads(image: Annotated[bytes, Body(media_type="image/jpeg")]) -> dict[str, Any]:
        return recogniser.answer(image)

    app.post("/predict")(on_the_loop if handler == "async def" else in_threads)
    return app


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["SERVING_THREADS"]))
    app = create_app(Path(os.environ["SERVING_DATA"]), os.environ["SERVING_HANDLER"])
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["SERVING_PORT"]), access_log=False, log_level="warning")
