"""The BentoML peer, with adaptive batching. Its batches are made of lists, so the image comes as a file of a form.

Of the two types that BentoML has for that, `PIL.Image` stays in memory; `Path` would write every image to the disk.
"""

from __future__ import annotations

from typing import Any

import bentoml  # type: ignore[import-not-found]
from PIL.Image import Image

from benchmarks.serving.apps.recogniser import PeerSettings, Recogniser

settings = PeerSettings.read()


@bentoml.service(
    workers=settings.workers,
    traffic={"timeout": 60},
    logging={"access": {"enabled": False}},
)
class Bento:
    def __init__(self) -> None:
        self.recogniser = Recogniser(settings)

    @bentoml.api(
        batchable=True,
        max_batch_size=settings.batch,
        max_latency_ms=int(settings.wait_ms),
    )  # type: ignore[untyped-decorator]
    def predict(self, images: list[Image]) -> list[dict[str, Any]]:
        return self.recogniser.answers([_bytes(image) for image in images])


def _bytes(image: Any) -> bytes:
    """What was sent: the image has been opened, but not yet decoded, and our reader wants it from the beginning."""
    image.fp.seek(0)
    data: bytes = image.fp.read()
    return data
