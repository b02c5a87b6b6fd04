"""The model of the peers, with the image reader and the answers of the service.

`SERVING_MODEL=onnx` is the predictor of the service, so that only the serving layer differs; this favours the peers,
because the model takes most of the time. `torch` is the naive model (torch_recogniser.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from models.inference.predictor import Predictor


@dataclass(frozen=True)
class PeerSettings:
    """Settings of a peer. They come from the environment, because the framework starts the worker processes."""

    data: Path
    port: int
    workers: int  # processes that compute
    threads: int  # of ONNX Runtime in each process
    batch: int
    wait_ms: float  # longest time that a batch waits for more images
    model: str  # onnx or torch

    @classmethod
    def read(cls) -> PeerSettings:
        def value(name: str) -> str:
            return os.environ[f"SERVING_{name}"]

        return cls(
            data=Path(value("DATA")),
            port=int(value("PORT")),
            workers=int(value("WORKERS")),
            threads=int(value("THREADS")),
            batch=int(value("BATCH")),
            wait_ms=float(value("WAIT_MS")),
            model=value("MODEL"),
        )


class Recogniser(Protocol):
    """Answers a batch of encoded images."""

    def answers(self, images: Sequence[bytes]) -> list[dict[str, Any]]: ...


def open_recogniser(settings: PeerSettings) -> Recogniser:
    if settings.model == "torch":
        from benchmarks.serving.apps.torch_recogniser import TorchRecogniser  # not every peer has torch

        return TorchRecogniser(settings.data, settings.threads)
    return OnnxRecogniser(settings)


class OnnxRecogniser:
    """The predictor of the service."""

    def __init__(self, settings: PeerSettings) -> None:
        self._predictor = Predictor.open(settings.data, threads=settings.threads)
        # Decode in parallel if the worker has several cores; they would be idle during decoding otherwise.
        self._decoders = ThreadPoolExecutor(settings.threads) if settings.threads > 1 else None
        self._warm(settings.batch)

    def answers(self, images: Sequence[bytes]) -> list[dict[str, Any]]:
        decode = self._predictor.decode
        pixels = list(self._decoders.map(decode, images) if self._decoders else map(decode, images))
        return [scored.answer.to_dict() for scored in self._predictor.score(pixels)]

    def _warm(self, batch: int) -> None:
        """Run once per batch size, as the service does: the first run of a size allocates memory."""
        crop = self._predictor.preprocessing.crop
        for size in (1, batch):
            self._predictor.score([np.zeros((3, crop, crop), np.float32)] * size)
