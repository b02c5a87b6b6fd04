"""Forgetting images for good: wherever this server holds them beside the image store of the tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from service.container import Container


async def forget(container: Container, sha256s: Collection[str]) -> int:
    """Out of the inbox, the recent predictions and the thumbnails; returns how many novelties there were.

    A sighting that is on its way into the inbox at this very moment may still arrive.
    """
    novelties = 0
    if container.inbox is not None:
        novelties = await asyncio.to_thread(container.inbox.delete_all, sha256s)
    for sha256 in sha256s:
        container.thumbnails.forget(sha256)
    await container.recent.erase(sha256s)
    return novelties
