"""The common way to serve a model: FastAPI with a torch model, one image per request.

`SERVING_HANDLER` selects the handler: `async def`, which computes on the event loop, or `def`, which FastAPI runs in
its thread pool.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import Body, FastAPI, Request

from benchmarks.serving.apps.torch_recogniser import TorchRecogniser


def create_app(data: Path, threads: int, handler: str) -> FastAPI:
    app = FastAPI()
    recogniser = TorchRecogniser(data, threads)

    async def on_the_loop(request: Request) -> dict[str, Any]:
        return recogniser.answers([await request.body()])[0]

    def in_threads(image: Annotated[bytes, Body(media_type="image/jpeg")]) -> dict[str, Any]:
        return recogniser.answers([image])[0]

    app.post("/predict")(on_the_loop if handler == "async def" else in_threads)
    return app


if __name__ == "__main__":
    threads, handler = int(os.environ["SERVING_THREADS"]), os.environ["SERVING_HANDLER"]
    app = create_app(Path(os.environ["SERVING_DATA"]), threads, handler)
    uvicorn.run(app, host="127.0.0.1", port=int(os.environ["SERVING_PORT"]), access_log=False, log_level="warning")
