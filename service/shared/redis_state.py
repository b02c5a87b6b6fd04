"""The keys of a data folder in Redis that its servers share, and the scripts that change them.

    <prefix>:recent:<id>     a recent prediction with its image; expires
    <prefix>:recent-index    sorted set of "<id> <sha256> <bytes>" by the time of the prediction
    <prefix>:recent-bytes    the sum of these bytes
    <prefix>:inbox-...       the shared inbox: see service/shared/inbox.py
    <prefix>:rate:<key>      the token bucket of an API key; expires
    <prefix>:keys            the hashes of API keys: see service/shared/key_store.py

Every script may be repeated when a connection breaks, as those of the task queue.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from importlib import resources
from typing import Any, Literal, get_args

import redis

from tasks.errors import QueueUnavailable
from tasks.queue import call_redis, connect

log = logging.getLogger(__name__)

REWRITE_ATTEMPTS, REWRITE_SECONDS = 40, 0.25

Script = Literal[
    "recent_put",
    "recent_erase",
    "inbox_send",
    "inbox_lease",
    "inbox_release",
    "inbox_commit",
    "rate_take",
    "keys_replace",
]


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

    def put(self, key: str, value: str) -> None:
        call_redis(self.client, lambda: self.client.set(f"{self.prefix}:{key}", value))

    def confirmed(self, replicas: int, seconds: float) -> int:
        """How many of the replicas have all writes until now, after at most so many seconds."""
        if not replicas:
            return 0

        def wait() -> int:
            # On one connection: WAIT counts the replicas that have the last write of its connection, and all before.
            pipeline = self.client.pipeline(transaction=False)
            pipeline.set(f"{self.prefix}:confirmed", "")
            pipeline.wait(replicas, round(seconds * 1000))
            return int(pipeline.execute()[1])

        return int(call_redis(self.client, wait))

    def hash_values(self, key: str) -> list[bytes]:
        found: Any = call_redis(self.client, lambda: self.client.hvals(f"{self.prefix}:{key}"))
        return list(found)

    def entries(self, stream: str, after: str = "-", count: int | None = None) -> list[tuple[str, dict[bytes, bytes]]]:
        """The entries of a stream after one of them."""
        first = after if after == "-" else f"({after}"
        found: Any = call_redis(self.client, lambda: self.client.xrange(f"{self.prefix}:{stream}", first, "+", count))
        return [(id.decode(), fields) for id, fields in found]

    def length(self, stream: str) -> int:
        return int(call_redis(self.client, lambda: self.client.xlen(f"{self.prefix}:{stream}")))

    def wait(self, stream: str, after: str, seconds: float) -> None:
        """Block until the stream has an entry after this one."""
        place: dict[Any, Any] = {f"{self.prefix}:{stream}": after}
        milliseconds = max(1, round(seconds * 1000))
        call_redis(self.client, lambda: self.client.xread(place, count=1, block=milliseconds))

    def rewrite_log(self) -> None:
        """Let Redis rewrite its append-only file, which otherwise contains values that were deleted.

        A rewriting that runs may contain them as well: another one follows it. A server that does not allow the command
        keeps its file. QueueUnavailable if no rewriting was started: try again.
        """
        for _ in range(REWRITE_ATTEMPTS):
            if call_redis(self.client, self._start_rewriting):
                return
            time.sleep(REWRITE_SECONDS)
        seconds = REWRITE_ATTEMPTS * REWRITE_SECONDS
        raise QueueUnavailable(
            "the append-only file of Redis may contain images that were removed, and Redis has been rewriting it for "
            f"more than {seconds:g} s: check its disk"
        )

    def _start_rewriting(self) -> bool:
        """False: another rewriting runs."""
        try:
            # Without an append-only file, a rewriting would write one, with all present values.
            if int(self.client.info("persistence").get("aof_enabled", 1)):
                self.client.bgrewriteaof()
        except redis.ResponseError as error:
            if "in progress" in str(error):
                return False
            log.warning("the append-only file of Redis may contain images that were removed: %s", error)
        return True

    def close(self) -> None:
        self.client.close()


def _source(name: str) -> str:
    return (resources.files("service.shared") / "scripts" / f"{name}.lua").read_text("utf-8")
