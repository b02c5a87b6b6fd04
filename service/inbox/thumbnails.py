"""Small JPEGs of the inbox's images, made on demand and cached."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from cachetools import LRUCache
from PIL import Image

from models.images import ImageLimits, open_image

MIN_SIZE, MAX_SIZE = 64, 512  # pixels of the longer side
MAX_BYTES = 32 * 2**20  # about a thousand thumbnails of the usual size
QUALITY = 85


class Thumbnails:
    """A cache of thumbnails by image and size. Call it on the event loop; only decoding runs in a thread.

    The thread is not one of /predict's, so a page of 200 thumbnails does not delay predictions.
    """

    def __init__(self, limits: ImageLimits, max_bytes: int = MAX_BYTES, threads: int = 1) -> None:
        self._limits = limits
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="thumbnails")
        self._cache: LRUCache[tuple[str, int], bytes] = LRUCache(max_bytes, getsizeof=len)
        self._removals = 0

    async def get(self, id: str, size: int, read: Callable[[str], bytes]) -> bytes:
        """The JPEG. `read` returns the image's bytes; it is called in a thread when the cache has no JPEG."""
        if (cached := self._cache.get((id, size))) is not None:
            return cached
        loop, removals = asyncio.get_running_loop(), self._removals
        data = await loop.run_in_executor(self._threads, lambda: thumbnail(read(id), size, self._limits))
        if removals == self._removals:  # otherwise the image may have been erased since it was read
            with suppress(ValueError):  # larger than the whole cache
                self._cache[id, size] = data
        return data

    def remove(self, id: str) -> None:
        """Remove all thumbnails of an image."""
        self._removals += 1
        for key in [key for key in self._cache if key[0] == id]:
            del self._cache[key]

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)


def thumbnail(data: bytes, size: int, limits: ImageLimits) -> bytes:
    """A JPEG of the upright image, its longer side at most `size`; ImageError when it cannot be read."""
    buffer = io.BytesIO()
    with open_image(data, limits, hint=size) as image:
        image.thumbnail((size, size), Image.Resampling.LANCZOS)
    image.save(buffer, format="JPEG", quality=QUALITY)
    return buffer.getvalue()
