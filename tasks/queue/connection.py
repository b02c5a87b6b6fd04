"""The way to Redis: how long we wait, how often we try, and what its failures are called."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import EqualJitterBackoff
from redis.retry import Retry

from tasks.errors import QueueUnavailable

SOCKET_SECONDS = 5.0  # for an answer; what blocks in Redis must block for less
CONNECT_SECONDS = 2.0
TRIES_AGAIN = 3  # with up to a second between them: a restarted server is back by then
LONGEST_PAUSE = 1.0
HEALTH_CHECK_SECONDS = 15  # a connection idle for longer is tried before it is used


def connect(url: str) -> redis.Redis:
    """A client for `redis://`, `rediss://` or `unix://`; may be shared by threads. Connects when it is first used."""
    try:
        return redis.Redis.from_url(
            url,
            decode_responses=True,
            encoding_errors="replace",  # An id from an address bar may hold anything; it is then simply unknown.
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            health_check_interval=HEALTH_CHECK_SECONDS,
            retry=Retry(EqualJitterBackoff(cap=LONGEST_PAUSE, base=0.05), TRIES_AGAIN),
        )
    except ValueError as error:
        raise QueueUnavailable(
            f"the address of Redis is wrong ({error}): give redis://host:port or unix:///path in OPENWORLD_REDIS_URL"
        ) from error


@contextmanager
def reaching_redis() -> Iterator[None]:
    """Whatever Redis or the way to it fails with, it is the queue that cannot be used now."""
    try:
        yield
    except redis.RedisError as error:
        raise QueueUnavailable(
            f"the queue cannot be used now ({' '.join(str(error).split()) or type(error).__name__}): "
            "check that Redis runs and has disk and memory left, then try again"
        ) from error
