"""What the peers that do not bring their own model get: ours, on ONNX Runtime, with our image reader and answers.

Only the layer around it differs from the service's, which is generous to them: it is the part that costs most.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from models.inference.predictor import Predictor


@dataclass(frozen=True)
class PeerSettings:
    """How a peer is set up, from the environment, for its workers are processes that others start."""

    data: Path
    port: int
    workers: int  # processes that compute
    threads: int  # of ONNX Runtime in each of them
    batch: int
    wait_ms: float  # that a batch may wait to be filled

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
        )


class Recogniser:
    """Bytes to answers, a batch at a time."""

    def __init__(self, settings: PeerSettings) -> None:
        self._predictor = Predictor.open(settings.data, threads=settings.threads)
        # A worker with one thread has a core to itself and would gain nothing; one with several would leave them idle.
        self._decoders = ThreadPoolExecutor(settings.threads) if settings.threads > 1 else None
        self._warm(settings.batch)

    def answers(self, images: Sequence[bytes]) -> list[dict[str, Any]]:
        decode = self._predictor.decode
        pixels = list(self._decoders.map(decode, images) if self._decoders else map(decode, images))
        return [scored.answer.to_dict() for scored in self._predictor.score(pixels)]

    def _warm(self, batch: int) -> None:
        """As the service does: the first pass of a size allocates."""
        crop = self._predictor.preprocessing.crop
        for size in (1, batch):
            self._predictor.score([np.zeros((3, crop, crop), np.float32)] * size)
