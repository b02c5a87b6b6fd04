"""The keys of a data folder in Redis that its servers share, and the scripts that change them.

    <prefix>:recent:<id>     a recent prediction with its image; expires
    <prefix>:recent-index    sorted set of "<id> <sha256> <bytes>" by the time of the prediction
    <prefix>:recent-bytes    the sum of these bytes

Every script may be repeated when a connection breaks, as those of the task queue.
"""

from __future__ import annotations

from functools import partial
from importlib import resources
from typing import Any, Literal, get_args

import redis

from tasks.queue import call_redis, connect

Script = Literal["recent_put", "recent_erase"]


class RedisState:
    """A connection with binary replies, and the scripts. Threads may share it. Every failure is QueueUnavailable."""

    def __init__(self, url: str, prefix: str) -> None:
        self.prefix = prefix
        self.client: redis.Redis = connect(url, decode=False)
        self._scripts = {name: self.client.register_script(_source(name)) for name in get_args(Script)}

    def run(self, script: Script, *arguments: str | bytes | float) -> Any:
        return call_redis(self.client, partial(self._scripts[script], keys=[self.prefix], args=arguments))

    def get(self, key: str) -> bytes | None:
        """The value of `<prefix>:<key>`."""
        found: Any = call_redis(self.client, lambda: self.client.get(f"{self.prefix}:{key}"))
        return None if found is None else bytes(found)

    def close(self) -> None:
        self.client.close()


def _source(name: str) -> str:
    return (resources.files("service.shared") / "scripts" / f"{name}.lua").read_text("utf-8")
