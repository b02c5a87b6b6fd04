"""The rows of the shared inbox for `openworld backup`; its images are files of the data folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

from tasks.queue import call_redis


def novelty_rows(client: redis.Redis, prefix: str) -> dict[str, str]:
    """The row of each novelty, by the sha256 of its image."""
    found: Any = call_redis(client, lambda: client.hgetall(f"{prefix}:inbox-rows"))
    return dict(found)


def inbox_seconds(client: redis.Redis, prefix: str) -> str:
    """For how long the inbox was open: the ages of novelties count from it."""
    found: Any = call_redis(client, lambda: client.get(f"{prefix}:inbox-ran"))
    return str(found or 0)


def restore_inbox(client: redis.Redis, prefix: str, rows: Mapping[str, str], seconds: str) -> None:
    """Give a Redis that has no shared inbox of the data folder these rows."""

    def write() -> None:
        mapping: dict[Any, Any] = dict(rows)
        pipeline = client.pipeline(transaction=True)
        pipeline.hset(f"{prefix}:inbox-rows", mapping=mapping)
        pipeline.set(f"{prefix}:inbox-ran", seconds)
        pipeline.set(f"{prefix}:inbox-matched", "1")  # an image without a row is none of these novelties
        pipeline.execute()

    if rows:
        call_redis(client, write)
