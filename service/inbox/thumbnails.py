"""Small JPEGs of the inbox's pictures: made in a thread or two of their own, and kept while there is room."""

from __future__ import annotations

import asyncio
import io
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from PIL import Image

from models.images import ImageLimits, read_image

SMALLEST, LARGEST = 64, 512  # pixels of the longer side
MAX_BYTES = 32 * 2**20  # some thousand of the usual size
QUALITY = 85


class Thumbnails:
    """Thumbnails by image and size. Lives on the event loop; only decoding leaves it.

    The threads are not those of /predict: a labeller who opens a page of two hundred must not slow the robots down.
    """

    def __init__(self, limits: ImageLimits, max_bytes: int = MAX_BYTES, threads: int = 1) -> None:
        self._limits, self._max_bytes = limits, max_bytes
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="thumbnails")
        self._kept: OrderedDict[tuple[str, int], bytes] = OrderedDict()  # last used last
        self.bytes = 0

    async def get(self, id: str, size: int, read: Callable[[str], bytes]) -> bytes:
        """The JPEG; `read` gives the image's bytes, in a thread, when it has to be made."""
        kept = self._kept.get((id, size))
        if kept is not None:
            self._kept.move_to_end((id, size))
            return kept
        loop = asyncio.get_running_loop()
        data = await loop.run_in_executor(self._threads, lambda: thumbnail(read(id), size, self._limits))
        self._keep((id, size), data)
        return data

    def forget(self, id: str) -> None:
        """Whoever deletes an image does not want a small one left."""
        for key in [key for key in self._kept if key[0] == id]:
            self.bytes -= len(self._kept.pop(key))

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _keep(self, key: tuple[str, int], data: bytes) -> None:
        self.bytes += len(data) - len(self._kept.pop(key, b""))
        self._kept[key] = data
        while self.bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self.bytes -= len(oldest)


def thumbnail(data: bytes, size: int, limits: ImageLimits) -> bytes:
    """A JPEG of the upright image, its longer side at most `size`; ImageError when it cannot be read."""
    image = read_image(data, limits, hint=size)
    image.thumbnail((size, size), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=QUALITY)
    return buffer.getvalue()
