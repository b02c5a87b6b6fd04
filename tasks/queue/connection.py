"""Connections to Redis: addresses, timeouts, repeated calls, and the error for all failures.

An address is `redis://`, `rediss://` (TLS), `unix://`, or that of Redis Sentinel, which names the primary:

    redis+sentinel://[user:password@]host:port,host:port,host:port/service[/database][?option=value]

`rediss+sentinel://` uses TLS. The options are those of `redis://`, and `sentinel_username` and `sentinel_password` for
sentinels with credentials of their own.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

import redis
import redis.asyncio
import redis.asyncio.retry
import redis.asyncio.sentinel
import redis.connection
import redis.sentinel
from redis.backoff import NoBackoff
from redis.exceptions import MasterDownError
from redis.retry import Retry

from models.backoff import Backoff
from tasks.errors import QueueUnavailable

SOCKET_SECONDS = 5.0  # for a reply; a blocking command must block for less
CONNECT_SECONDS = 2.0
SENTINEL_SECONDS = 1.0  # for a connection to a sentinel, and for its reply
HEALTH_CHECK_SECONDS = 15  # a connection that was idle for longer is pinged before use
# Calls are repeated for so long after their first failure.
RESTART_SECONDS = 2.0  # enough for a restart of Redis
FAILOVER_SECONDS = 10.0  # enough for sentinels to notice that the primary is gone, and to promote a replica
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0  # seconds between attempts

SENTINEL_PORT = 26379
SCHEMES = {"redis+sentinel": "redis", "rediss+sentinel": "rediss"}
FORMS = "redis://host:port, unix:///path or redis+sentinel://host:port,host:port/service"

T = TypeVar("T")

# Without types in the library.
_Sentinel: Any = redis.sentinel.Sentinel
_AsyncSentinel: Any = redis.asyncio.sentinel.Sentinel
_parse_url: Any = redis.connection.parse_url


class SentinelAddress(NamedTuple):
    """The parts of an address of Redis Sentinel."""

    sentinels: tuple[tuple[str, int], ...]
    service: str
    options: dict[str, Any]  # of connections to the primary
    sentinel_options: dict[str, Any]  # of connections to sentinels


def connect(url: str, *, decode: bool = True, patient: bool = True) -> redis.Redis:
    """Make a client for an address. Threads may share it. It connects on first use.

    `decode`: replies are texts, else bytes. Not `patient`: for one quick call, such as a check at the start.
    """
    # No retries inside the client: with Sentinel they multiply. `call_redis` repeats the calls that may be repeated.
    options: dict[str, Any] = {
        "decode_responses": decode,
        "encoding_errors": "replace",  # a task id from a URL may hold lone surrogates; it is then unknown
        "socket_timeout": SOCKET_SECONDS if patient else CONNECT_SECONDS,
        "socket_connect_timeout": CONNECT_SECONDS,
        "health_check_interval": HEALTH_CHECK_SECONDS,
        "retry": Retry(NoBackoff(), 0),
    }
    try:
        address = parse_sentinel(url)
        if address is None:
            return redis.Redis.from_url(url, **options)
        sentinel = _Sentinel(
            address.sentinels, sentinel_kwargs=_sentinel_options(address) | {"retry": Retry(NoBackoff(), 0)}
        )
        found: redis.Redis = sentinel.master_for(
            address.service, redis_class=_PrimaryClient, **options | address.options
        )
        return found
    except ValueError:
        raise _wrong_address() from None  # the message of the library may contain a part of the password


def connect_async(url: str, socket_seconds: float) -> redis.asyncio.Redis:
    """Make a client for asyncio that repeats nothing: its caller must know when a connection was lost."""
    options: dict[str, Any] = {
        "decode_responses": True,
        "encoding_errors": "replace",
        "socket_connect_timeout": CONNECT_SECONDS,
        "socket_timeout": socket_seconds,
        "retry": redis.asyncio.retry.Retry(NoBackoff(), 0),
    }
    address = parse_sentinel(url)
    if address is None:
        return redis.asyncio.Redis.from_url(url, **options)
    sentinel = _AsyncSentinel(
        address.sentinels, sentinel_kwargs=_sentinel_options(address) | {"retry": options["retry"]}
    )
    found: redis.asyncio.Redis = sentinel.master_for(
        address.service, redis_class=_AsyncPrimaryClient, **options | address.options
    )
    return found


class _PrimaryClient(redis.Redis):
    """Closes its connections to the sentinels, too."""

    def close(self) -> None:
        super().close()
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            sentinel.close()


class _AsyncPrimaryClient(redis.asyncio.Redis):
    """The same for asyncio."""

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        pool: Any = self.connection_pool
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()


def parse_sentinel(url: str) -> SentinelAddress | None:
    """The parts of an address of Sentinel; None for another address. ValueError if it is wrong."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        return None
    credentials, at, hosts = parts.netloc.rpartition("@")
    service, _, database = parts.path.strip("/").partition("/")
    if not hosts or not service:
        raise ValueError("an address of Sentinel has hosts and the name of a service")
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    own: dict[str, Any] = {
        name: query.pop(f"sentinel_{name}") for name in ("username", "password") if f"sentinel_{name}" in query
    }
    # The library reads user, password, database and options as those of an address with one host.
    options: dict[str, Any] = dict(
        _parse_url(f"{SCHEMES[parts.scheme]}://{credentials}{at}host/{database}?{urlencode(query)}")
    )
    for name in ("host", "port", "connection_class"):
        options.pop(name, None)
    if parts.scheme == "rediss+sentinel":
        options["ssl"] = own["ssl"] = True
    return SentinelAddress(tuple(_host_and_port(one) for one in hosts.split(",")), unquote(service), options, own)


def _host_and_port(text: str) -> tuple[str, int]:
    parts = urlsplit(f"//{text}")  # understands [::1]:26379
    if not parts.hostname:
        raise ValueError("a host of the address is empty")
    return parts.hostname, parts.port or SENTINEL_PORT


def _sentinel_options(address: SentinelAddress) -> dict[str, Any]:
    timeouts = {"socket_timeout": SENTINEL_SECONDS, "socket_connect_timeout": SENTINEL_SECONDS}
    return timeouts | address.sentinel_options


def uses_sentinel(client: redis.Redis) -> bool:
    return isinstance(client.connection_pool, redis.sentinel.SentinelConnectionPool)


def key_prefix(folder_id: str) -> str:
    """The start of all keys of a data folder. Redis Cluster hashes the part in braces: the keys share a node."""
    return f"openworld:{{{folder_id}}}"


def call_redis(client: redis.Redis, call: Callable[[], T]) -> T:
    """The result of `call`, which is repeated while Redis restarts or fails over; QueueUnavailable if that takes long.

    **Only for calls that may run twice**: a connection that breaks does not tell whether the command or its reply was
    lost. Reads may. So may our scripts, which are atomic and recognise their repetition, commands that set a value, and
    notices, which receivers may get twice.
    """
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
    deadline = time.monotonic() + (FAILOVER_SECONDS if uses_sentinel(client) else RESTART_SECONDS)
    while True:
        try:
            return call()
        except redis.RedisError as error:
            if not _is_passing(error) or time.monotonic() > deadline:
                raise unavailable(error) from error
            if not isinstance(error, (redis.ConnectionError, redis.TimeoutError)):
                # The server was the primary: the next connection is to the present one.
                client.connection_pool.disconnect(inuse_connections=False)
        time.sleep(backoff.next())


def _is_passing(error: redis.RedisError) -> bool:
    """Whether another attempt may succeed: the connection was lost, or the server is not the primary any more."""
    if isinstance(error, redis.AuthenticationError):  # a ConnectionError
        return False
    if isinstance(error, (redis.ConnectionError, redis.TimeoutError, redis.ReadOnlyError, MasterDownError)):
        return True
    return "-READONLY" in str(error)  # Redis 6.2 reports an error inside a script as a text


def unavailable(error: Exception) -> QueueUnavailable:
    return QueueUnavailable(
        f"the queue cannot be used now ({' '.join(str(error).split()) or type(error).__name__}): "
        "check that Redis runs and has disk and memory left, then try again"
    )


def _wrong_address() -> QueueUnavailable:
    return QueueUnavailable(
        f"the address of Redis is wrong: set OPENWORLD_REDIS_URL to {FORMS}, and percent-encode / # ? @ in the password"
    )
