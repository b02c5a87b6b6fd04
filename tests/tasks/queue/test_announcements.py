"""Announcements of new versions: delivered at once, and harmless when Redis is not there."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from pathlib import Path

import pytest
import redis

from tasks.queue import announcements, connect
from tasks.queue.announcements import CONNECTED, announce, listen
from tests.support.redis_servers import FEWER_SERVERS_AND_PROTOCOLS, PREFIX, RedisServer
from tests.support.waiting import wait_until


@pytest.fixture(scope="module", params=FEWER_SERVERS_AND_PROTOCOLS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RedisServer, int]]:
    binary, protocol = request.param
    with RedisServer(tmp_path_factory.mktemp("redis"), binary) as server:
        yield server, protocol


@pytest.fixture
def server(served: tuple[RedisServer, int]) -> RedisServer:
    return served[0]


@pytest.fixture
def url(served: tuple[RedisServer, int]) -> str:
    return f"{served[0].url}?protocol={served[1]}"


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with closing(connect(url)) as client:
        yield client


async def next_version(versions: AsyncGenerator[int, None]) -> int:
    return await asyncio.wait_for(anext(versions), 60)


def kill(server: RedisServer) -> None:
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        pass


def test_a_listener_yields_the_connection_and_then_every_version(url: str, client: redis.Redis) -> None:
    async def main() -> list[int]:
        async with aclosing(listen(url, PREFIX)) as versions:
            first = await next_version(versions)
            announce(client, 7, PREFIX)
            announce(client, 8, PREFIX)
            return [first, await next_version(versions), await next_version(versions)]

    assert asyncio.run(main()) == [CONNECTED, 7, 8]


def test_a_listener_reconnects_when_redis_was_killed(server: RedisServer, url: str, client: redis.Redis) -> None:
    async def main() -> list[int]:
        async with aclosing(listen(url, PREFIX)) as versions:
            found = [await next_version(versions)]
            kill(server)
            waiting = asyncio.ensure_future(next_version(versions))
            await asyncio.sleep(0.1)
            await asyncio.to_thread(server.start)
            found.append(await waiting)
            announce(client, 9, PREFIX)
            return [*found, await next_version(versions)]

    assert asyncio.run(main()) == [CONNECTED, CONNECTED, 9]


def test_a_listener_may_start_before_redis(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)

    async def main() -> int:
        async with aclosing(listen(f"unix://{tmp_path}/redis.sock", PREFIX)) as versions:
            waiting = asyncio.ensure_future(next_version(versions))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await asyncio.to_thread(server.start)
            return await waiting

    try:
        assert asyncio.run(main()) == CONNECTED
    finally:
        server.stop()


def test_silence_is_no_failure_while_redis_answers_pings(
    url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcements, "HEARTBEAT_SECONDS", 1.0)

    async def main() -> list[int]:
        async with aclosing(listen(url, PREFIX)) as versions:
            found = [await next_version(versions)]
            waiting = asyncio.ensure_future(next_version(versions))
            await asyncio.sleep(2.5)
            announce(client, 3, PREFIX)
            return [*found, await waiting]

    assert asyncio.run(main()) == [CONNECTED, 3]


def test_a_listener_reconnects_when_redis_hangs(server: RedisServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announcements, "HEARTBEAT_SECONDS", 0.05)

    async def main() -> list[int]:
        async with aclosing(listen(url, PREFIX)) as versions:
            found = [await next_version(versions)]
            assert server.pid
            os.kill(server.pid, signal.SIGSTOP)
            try:
                waiting = asyncio.ensure_future(next_version(versions))
                await asyncio.sleep(0.3)
                assert not waiting.done()
            finally:
                os.kill(server.pid, signal.SIGCONT)
            return [*found, await waiting]

    assert asyncio.run(main()) == [CONNECTED, CONNECTED]


def test_a_listener_can_be_cancelled_while_listening_or_connecting(url: str, tmp_path: Path) -> None:
    async def main(address: str) -> None:
        async def listener() -> None:
            async for _ in listen(address, PREFIX):
                pass

        task = asyncio.create_task(listener())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)

    asyncio.run(main(url))
    asyncio.run(main(f"unix://{tmp_path}/nothing.sock"))


def test_a_closed_listener_leaves_no_connection(url: str, client: redis.Redis) -> None:
    async def main() -> None:
        async with aclosing(listen(url, PREFIX)) as versions:
            await next_version(versions)
            assert client.pubsub_numsub(f"{PREFIX}:versions") == [(f"{PREFIX}:versions", 1)]

    asyncio.run(main())
    wait_until(lambda: client.pubsub_numsub(f"{PREFIX}:versions") == [(f"{PREFIX}:versions", 0)])


def test_a_message_that_is_not_a_version_is_ignored(url: str, client: redis.Redis) -> None:
    async def main() -> list[int]:
        async with aclosing(listen(url, PREFIX)) as versions:
            first = await next_version(versions)
            for text in ("hello", "-1", "", "٣"):
                client.publish(f"{PREFIX}:versions", text)
            client.publish("others:versions", "5")
            announce(client, 4, PREFIX)
            return [first, await next_version(versions)]

    assert asyncio.run(main()) == [CONNECTED, 4]


def test_a_failed_announcement_is_logged_and_raises_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        announce(connect(f"unix://{tmp_path}/nothing.sock"), 5, PREFIX)
    assert "version 5 could not be announced" in caplog.text
