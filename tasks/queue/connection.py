"""Connections to Redis: timeouts, retries, and the error for all failures."""

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from redis.backoff import EqualJitterBackoff
from redis.retry import Retry

from tasks.errors import QueueUnavailable

SOCKET_SECONDS = 5.0  # for a reply; a blocking command must block for less
CONNECT_SECONDS = 2.0
RETRIES = 3
LONGEST_PAUSE = 1.0  # seconds between retries: enough for a restart of Redis
HEALTH_CHECK_SECONDS = 15  # a connection that was idle for longer is pinged before use


def connect(url: str) -> redis.Redis:
    """Make a client for `redis://`, `rediss://` or `unix://`. Threads may share it. It connects on first use."""
    try:
        return redis.Redis.from_url(
            url,
            decode_responses=True,
            encoding_errors="replace",  # a task id from a URL may hold lone surrogates; it is then unknown
            socket_timeout=SOCKET_SECONDS,
            socket_connect_timeout=CONNECT_SECONDS,
            health_check_interval=HEALTH_CHECK_SECONDS,
            retry=Retry(EqualJitterBackoff(cap=LONGEST_PAUSE, base=0.05), RETRIES),
        )
    except ValueError as error:
        raise QueueUnavailable(
            f"the address of Redis is wrong ({error}): set OPENWORLD_REDIS_URL to redis://host:port or unix:///path"
        ) from error


def key_prefix(folder_id: str) -> str:
    """The start of all keys of a data folder. Redis Cluster hashes the part in braces: the keys share a node."""
    return f"openworld:{{{folder_id}}}"


@contextmanager
def redis_errors() -> Iterator[None]:
    """Raise every error of Redis or of the connection as `QueueUnavailable`."""
    try:
        yield
    except redis.RedisError as error:
        raise QueueUnavailable(
            f"the queue cannot be used now ({' '.join(str(error).split()) or type(error).__name__}): "
            "check that Redis runs and has disk and memory left, then try again"
        ) from error
