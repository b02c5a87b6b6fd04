"""Hands novel images to the owner of the shared inbox: the image to the image store, a record to a stream in Redis.

A server sends no more novel images per second than the inbox may get from all of them, and none while `MAX_WAITING`
records wait for an owner.
"""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple

from models.errors import ImageError, ImageTooLarge
from models.files import sha256_bytes
from models.images import ImageLimits
from service.inbox import AddResult, InboxLimits, Sighting
from service.inbox.similarity import ImageInfo, inspect_image
from service.shared.redis_state import RedisState
from service.shared.sightings import pack_sighting, unpack_sighting
from service.token_bucket import TokenBucket
from tasks.images import ImageStore

MAX_WAITING = 1000  # records that the owner has not applied
IDS_PER_RECORD = 1000


class SightingRecord(NamedTuple):
    """A sighting whose image is in the image store."""

    sighting: Sighting  # without the image
    info: ImageInfo


class LabelledRecord(NamedTuple):
    """The images of a task: those of them that are novelties are labelled."""

    ids: list[str]


class InboxSink:
    """A `NoveltySink` for all servers, also for the owner. Threads may share it."""

    def __init__(self, state: RedisState, images: ImageStore, limits: InboxLimits, image_limits: ImageLimits) -> None:
        self._state, self._images, self._limits, self._image_limits = state, images, limits, image_limits
        self._bucket = TokenBucket(limits.rate, limits.burst)
        self._sender, self._number = secrets.token_hex(8), 0
        self._lock = threading.Lock()  # records are sent in the order of their numbers

    def add(self, sighting: Sighting) -> AddResult:
        """QueueUnavailable or StoreError if it cannot be handed over; the owner removes an image without a record."""
        id = sighting.sha256 or sha256_bytes(sighting.data)
        if len(sighting.data) > self._limits.max_bytes:
            return AddResult("dropped", reason="too_large")
        try:
            info = inspect_image(sighting.data, self._image_limits)
        except ImageTooLarge:
            return AddResult("dropped", reason="too_large")
        except ImageError:
            return AddResult("dropped", reason="unreadable")
        if self._bucket.take() > 0:
            return AddResult("dropped", reason="rate")
        if self._state.length("inbox-stream") >= MAX_WAITING:
            return AddResult("dropped", reason="queue")
        self._images.put(sighting.data)
        packed = pack_sighting(replace(sighting, data=b"", sha256=id))
        if not self._send("sighting", json.dumps(info).encode() + b"\n" + packed):
            return AddResult("dropped", reason="queue")
        return AddResult("new", id)  # or folded: the owner finds that out

    def sweep(self) -> int:
        """The owner does it."""
        return 0

    def mark_labelled(self, ids: Collection[str]) -> None:
        """Tell the owner that these images, of which some may be novelties, are labelled."""
        listed = list(ids)
        for start in range(0, len(listed), IDS_PER_RECORD):
            self._send("labelled", json.dumps(listed[start : start + IDS_PER_RECORD]).encode())

    def _send(self, kind: str, data: bytes) -> bool:
        with self._lock:
            self._number += 1
            reply = self._state.run("inbox_send", self._sender, self._number, kind, data, MAX_WAITING)
        return bool(reply == b"sent")


def read_record(fields: dict[bytes, bytes]) -> SightingRecord | LabelledRecord:
    """The content of a stream entry. ValueError if a server has written something else."""
    data = fields[b"data"]
    if fields[b"kind"] == b"labelled":
        return LabelledRecord([str(id) for id in json.loads(data)])
    text, _, packed = data.partition(b"\n")
    info: list[Any] = json.loads(text)
    return SightingRecord(unpack_sighting(packed), ImageInfo(*info))
