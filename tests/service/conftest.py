"""Redis for what servers share."""

from collections.abc import Iterator
from contextlib import closing

import pytest

from service.shared import RedisState
from tests.support.redis_servers import PREFIX, REDIS_SERVERS, RedisServer


@pytest.fixture(scope="module", params=REDIS_SERVERS)
def redis_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis"), request.param) as running:
        yield running


@pytest.fixture
def redis_state(redis_server: RedisServer) -> Iterator[RedisState]:
    """Empty at first."""
    with closing(RedisState(redis_server.url, PREFIX)) as found:
        found.client.flushall()
        yield found
