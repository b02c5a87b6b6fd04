"""The last predictions, with their images: so that somebody can still say "that was wrong".

In memory and in this server alone, by the ids that its answers carried. Bounded in bytes and in count; the newest win.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Iterable

from models.files import sha256_bytes
from service.inbox import Sighting

MAX_BYTES = 64 * 2**20
MAX_COUNT = 5000
OVERHEAD = 1024  # bytes that an answer takes beside its image and its embedding, roughly


class Recent:
    """Sightings by prediction id. Changed on the event loop only, so that nothing here needs a lock."""

    def __init__(self, max_bytes: int = MAX_BYTES, max_count: int = MAX_COUNT) -> None:
        self._max_bytes, self._max_count = max_bytes, max_count
        self._kept: OrderedDict[str, Sighting] = OrderedDict()  # the oldest first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"Recent({len(self)} predictions, {self.bytes} of {self._max_bytes} bytes)"

    def put(self, sighting: Sighting) -> None:
        """Keep a prediction, in place of the oldest; one larger than all the room there is drives nobody out."""
        size = _size(sighting)
        if size > self._max_bytes or self._max_count < 1:
            return
        self._drop([sighting.prediction_id])
        self._kept[sighting.prediction_id] = sighting
        self.bytes += size
        while self.bytes > self._max_bytes or len(self._kept) > self._max_count:
            self._drop([next(iter(self._kept))])

    def get(self, prediction_id: str) -> Sighting | None:
        return self._kept.get(prediction_id)

    async def forget(self, sha256s: Collection[str]) -> int:
        """Drop every prediction on these images; returns how many. Hashing them all takes a moment, in a thread."""
        kept = tuple(self._kept.values())
        return self._drop(await asyncio.to_thread(_showing, kept, frozenset(sha256s)))

    def _drop(self, prediction_ids: Iterable[str]) -> int:
        found = [gone for id in prediction_ids if (gone := self._kept.pop(id, None)) is not None]
        self.bytes -= sum(_size(gone) for gone in found)
        return len(found)


def _size(sighting: Sighting) -> int:
    embedding = sighting.embedding
    return len(sighting.data) + (0 if embedding is None else embedding.nbytes) + OVERHEAD


def _showing(sightings: Iterable[Sighting], sha256s: Collection[str]) -> list[str]:
    # Not hashed when they are put: that would cost every prediction what a deletion, once in a while, costs here.
    return [one.prediction_id for one in sightings if (one.sha256 or sha256_bytes(one.data)) in sha256s]
