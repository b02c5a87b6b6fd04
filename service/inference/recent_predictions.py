"""The last predictions with their images, so that a person can still correct one.

In memory, of this server only, by prediction id. The oldest are dropped first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

from cachetools import FIFOCache

from models.files import sha256_bytes
from service.inbox import Sighting

MAX_COUNT = 5000
OVERHEAD = 1024  # approximate bytes per prediction besides its image and embedding


class RecentPredictions:
    """Sightings by prediction id, bounded in bytes and count. Change it on the event loop; `get` is thread-safe."""

    rewrite = False  # see SharedPredictions

    def __init__(self, max_bytes: int = 64 * 2**20, max_count: int = MAX_COUNT) -> None:
        self._sightings: FIFOCache[str, Sighting] = FIFOCache(max_bytes, _size)
        self._max_count = max_count

    def __len__(self) -> int:
        return len(self._sightings)

    def put(self, sighting: Sighting) -> None:
        """Keep a prediction in place of the oldest ones. One that is larger than the limit is not kept."""
        if _size(sighting) > self._sightings.maxsize:
            return
        self._sightings[sighting.prediction_id] = sighting
        while len(self._sightings) > self._max_count:
            self._sightings.popitem()

    def get(self, prediction_id: str) -> Sighting | None:
        try:
            return self._sightings[prediction_id]
        except KeyError:
            return None

    async def erase(self, sha256s: Collection[str]) -> int:
        """Drop all predictions on these images and return how many there were. A thread hashes the kept images."""
        sightings = tuple(self._sightings.values())
        found = await asyncio.to_thread(_ids_of_images, sightings, frozenset(sha256s))
        return sum(self._sightings.pop(id, None) is not None for id in found)

    def close(self) -> None:
        """Nothing to release."""


def _size(sighting: Sighting) -> int:
    embedding = sighting.embedding
    return len(sighting.data) + (0 if embedding is None else embedding.nbytes) + OVERHEAD


def _ids_of_images(sightings: Iterable[Sighting], sha256s: Collection[str]) -> list[str]:
    # Hashed here and not in `put`: an erasure is rare, a prediction is not.
    return [one.prediction_id for one in sightings if (one.sha256 or sha256_bytes(one.data)) in sha256s]
