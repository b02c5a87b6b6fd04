"""The word that a new version is current. It may get lost: who needs to know also looks for himself, now and then."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import redis
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from models.backoff import Backoff
from tasks.queue.connection import CONNECT_SECONDS

LOOK = 0  # heard after every (re)connect: announcements may have been missed, so look which version is current
HEARTBEAT_SECONDS = 15.0  # of silence before we ask whether the other side is there, and then to its answer
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to connect

_log = logging.getLogger(__name__)


def announce(client: redis.Redis, version: int, prefix: str = "openworld") -> None:
    """Tell every listener. Never raises: the version is published whether they hear of it now or find it later."""
    try:
        client.publish(_channel(prefix), str(version))
    except redis.RedisError as error:
        _log.warning("version %d could not be announced (%s); servers will find it when they next look", version, error)


async def listen(url: str, prefix: str = "openworld") -> AsyncGenerator[int, None]:
    """Versions as they are announced, for ever; `LOOK` after every (re)connect. Ends only by being cancelled or closed.

    Who breaks out of the loop closes it: `async with aclosing(listen(url)) as versions`.
    """
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)  # not all the servers at the same moment
    while True:
        try:
            async with aclosing(_until_it_breaks(url, _channel(prefix))) as heard:
                async for version in heard:
                    backoff.reset()
                    yield version
        except Exception as error:  # whatever somebody sends on this channel: who listens goes on listening
            # Once when it breaks, then quietly: a night without Redis need not fill a disk.
            level = logging.WARNING if backoff.failures == 0 else logging.DEBUG
            _log.log(level, "no announcements of new versions for now (%s); connecting again", error)
        await asyncio.sleep(backoff.next())


async def _until_it_breaks(url: str, channel: str) -> AsyncGenerator[int, None]:
    async with AsyncExitStack() as stack:
        # No retries of the client's own: it would connect again behind our back, and we would not know what we missed.
        client = Redis.from_url(
            url,
            decode_responses=True,
            encoding_errors="replace",
            socket_connect_timeout=CONNECT_SECONDS,
            socket_timeout=HEARTBEAT_SECONDS,
            retry=Retry(NoBackoff(), 0),
        )
        stack.push_async_callback(client.aclose)
        pubsub = client.pubsub()
        stack.push_async_callback(pubsub.aclose)
        await pubsub.subscribe(channel)
        asked = False
        while True:
            message = await pubsub.get_message(timeout=HEARTBEAT_SECONDS)
            if message is None:
                if asked:
                    raise redis.ConnectionError("the other side is silent")
                await pubsub.ping()
                asked = True
                continue
            asked = False
            if message["type"] == "subscribe":
                yield LOOK
            elif message["type"] == "message":
                text = str(message["data"])
                if text.isascii() and text.isdigit() and len(text) <= 18:
                    yield int(text)
                else:
                    _log.warning("an announcement that is no version number: %.80r", text)


def _channel(prefix: str) -> str:
    return f"{prefix}:versions"
