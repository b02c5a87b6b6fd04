"""The BentoML peer, with adaptive batching. BentoML batches lists, so each image is sent as a form file.

It supports two types for such a file: `PIL.Image` stays in memory, `Path` would write every image to disk.
"""

from __future__ import annotations

from typing import Any

import bentoml  # type: ignore[import-not-found]
from PIL.Image import Image

from benchmarks.serving.apps.recogniser import PeerSettings, open_recogniser

settings = PeerSettings.read()


@bentoml.service(
    workers=settings.workers,
    traffic={"timeout": 60},
    logging={"access": {"enabled": False}},
)
class Bento:
    def __init__(self) -> None:
        self.recogniser = open_recogniser(settings)

    @bentoml.api(
        batchable=True,
        max_batch_size=settings.batch,
        max_latency_ms=int(settings.wait_ms),
    )  # type: ignore[untyped-decorator]
    def predict(self, images: list[Image]) -> list[dict[str, Any]]:
        return self.recogniser.answers([_bytes(image) for image in images])


def _bytes(image: Any) -> bytes:
    """Return the bytes that were sent. BentoML has opened the image, but not decoded it."""
    image.fp.seek(0)
    data: bytes = image.fp.read()
    return data
