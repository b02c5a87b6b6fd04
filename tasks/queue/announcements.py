"""Best-effort pub/sub notices of a new current version. A notice may get lost: listeners must also poll."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing

import redis

from models.backoff import Backoff
from tasks.errors import QueueUnavailable
from tasks.queue.connection import call_redis, connect_async

CONNECTED = 0  # yielded after every (re)connect: notices may have been missed, so check the current version
HEARTBEAT_SECONDS = 15.0  # silence before a ping, and then the longest wait for its answer
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to connect

log = logging.getLogger(__name__)


def announce(client: redis.Redis, version: int, prefix: str) -> None:
    """Notify every listener. Never raises: listeners that miss the notice find the version when they poll."""
    try:
        call_redis(client, lambda: client.publish(_channel(prefix), str(version)))
    except QueueUnavailable as error:
        log.warning("version %d could not be announced (%s); servers find it when they next poll", version, error)


async def listen(url: str, prefix: str) -> AsyncGenerator[int, None]:
    """Yield announced versions, and `CONNECTED` after every (re)connect. Ends only when it is cancelled or closed.

    A caller that leaves the loop must close it: `async with aclosing(listen(url, prefix)) as versions`.
    """
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, jitter=0.5)
    while True:
        try:
            async with aclosing(_listen_once(url, _channel(prefix))) as versions:
                async for version in versions:
                    backoff.reset()
                    yield version
        except Exception as error:  # whatever arrives on the channel, the listener must continue
            # Only the first failure is a warning: a long outage must not fill the log.
            level = logging.DEBUG if backoff.failures else logging.WARNING
            log.log(level, "no announcements of new versions for now (%s); connecting again", error)
        await asyncio.sleep(backoff.next())


async def _listen_once(url: str, channel: str) -> AsyncGenerator[int, None]:
    """Listen until the connection breaks."""
    async with AsyncExitStack() as stack:
        # No retries inside the client: after a silent reconnect nothing would tell that notices were missed.
        client = connect_async(url, HEARTBEAT_SECONDS)
        stack.push_async_callback(client.aclose)
        pubsub = client.pubsub()
        stack.push_async_callback(pubsub.aclose)
        await pubsub.subscribe(channel)
        pinged = False
        while True:
            message = await pubsub.get_message(timeout=HEARTBEAT_SECONDS)
            if message is None:
                if pinged:
                    raise redis.ConnectionError("Redis does not answer")
                await pubsub.ping()
                pinged = True
                continue
            pinged = False
            if message["type"] == "subscribe":
                yield CONNECTED
            elif message["type"] == "message":
                text = str(message["data"])
                if text.isascii() and text.isdigit() and len(text) <= 18:
                    yield int(text)
                else:
                    log.warning("ignored an announcement that is not a version number: %.80r", text)


def _channel(prefix: str) -> str:
    return f"{prefix}:versions"
