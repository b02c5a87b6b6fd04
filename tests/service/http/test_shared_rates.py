"""The rate of a key over all servers."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from service.errors import RateLimited
from service.http import shared_rates
from service.http.shared_rates import SharedRateLimiter
from service.shared import RedisState
from tests.support.redis_servers import PREFIX


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait for Redis for as long as it takes: none is limited by its server alone."""
    monkeypatch.setattr(shared_rates, "SECONDS", 60.0)


@pytest.mark.usefixtures("patient")
def test_two_servers_share_the_bucket_of_a_key(redis_state: RedisState) -> None:
    async def use() -> None:
        with (
            closing(SharedRateLimiter(redis_state, 0.1, 20)) as one,
            closing(SharedRateLimiter(redis_state, 0.1, 20)) as other,
        ):
            await one.admit("robot", 12)
            await other.admit("robot", 8)
            with pytest.raises(RateLimited, match="to all servers") as found:
                await other.admit("robot", 5)
            assert 0 < found.value.retry_after <= 50
            await other.admit("another", 20)  # has a bucket of its own

    asyncio.run(use())


@pytest.mark.usefixtures("patient")
def test_a_refused_request_is_admitted_after_its_retry_after(redis_state: RedisState) -> None:
    waits: list[float] = []

    async def use(limiter: SharedRateLimiter) -> None:
        await limiter.admit("robot", 20)
        while True:
            try:
                return await limiter.admit("robot", 10)
            except RateLimited as refused:
                waits.append(refused.retry_after)
                await asyncio.sleep(refused.retry_after)

    with closing(SharedRateLimiter(redis_state, 10, 20)) as limiter:
        asyncio.run(asyncio.wait_for(use(limiter), 60))
    assert all(0 < wait <= 1 for wait in waits), waits


@pytest.mark.usefixtures("patient")
def test_a_request_that_is_refused_later_gives_its_first_token_back(redis_state: RedisState) -> None:
    async def use() -> None:
        with closing(SharedRateLimiter(redis_state, 0.001, 4)) as limiter:
            await limiter.admit("robot", 1)
            await limiter.admit("robot", 1, paid=1)  # it had one image
            await limiter.admit("robot", 1)
            with pytest.raises(RateLimited):
                await limiter.admit("robot", 4, paid=1)
            await limiter.admit("robot", 3)

    asyncio.run(use())


def test_without_redis_each_server_limits_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def use(limiter: SharedRateLimiter) -> None:
        await limiter.admit("robot", 4)
        with pytest.raises(RateLimited):
            await limiter.admit("robot", 4)

    with (
        closing(RedisState(f"unix://{tmp_path}/absent.sock", PREFIX)) as redis_state,
        closing(SharedRateLimiter(redis_state, 0.1, 4)) as limiter,
    ):
        asyncio.run(use(limiter))
    assert caplog.text.count("limited per server") == 1


def test_without_a_rate_redis_is_not_asked(tmp_path: Path) -> None:
    with closing(RedisState(f"unix://{tmp_path}/absent.sock", PREFIX)) as redis_state:
        asyncio.run(SharedRateLimiter(redis_state, 0, 4).admit("robot", 1000))
        assert redis_state.client.connection_pool._created_connections == 0  # type: ignore[attr-defined]
