"""Addresses of Redis and of its sentinels, repeated calls, and the check of the server at the start."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from tasks.errors import QueueUnavailable, QueueUnsuitable
from tasks.queue import TaskQueue, check_redis, connect, server_check
from tasks.queue.connection import parse_sentinel
from tasks.settings import ProgramSettings
from tests.support.redis_servers import PREFIX, REDIS_SERVERS, RedisServer, make_task


def test_an_address_of_sentinel_names_hosts_service_and_database() -> None:
    found = parse_sentinel("redis+sentinel://ann:p%40ss@one:26380,[::1]:26381,three/robots/2?protocol=3")
    assert found is not None
    assert found.sentinels == (("one", 26380), ("::1", 26381), ("three", 26379))
    assert found.service == "robots"
    assert found.options["db"] == 2
    assert (found.options["username"], found.options["password"]) == ("ann", "p@ss")
    assert found.sentinel_options == {}


def test_sentinels_may_have_a_password_and_tls() -> None:
    found = parse_sentinel("rediss+sentinel://one/robots?sentinel_password=secret")
    assert found is not None
    assert found.sentinel_options == {"password": "secret", "ssl": True}
    assert found.options == {"ssl": True}


def test_other_addresses_are_not_those_of_sentinel() -> None:
    assert parse_sentinel("redis://host:6379/0") is None
    assert parse_sentinel("unix:///run/redis.sock") is None


@pytest.mark.parametrize(
    "url", ["redis+sentinel://one:26379", "redis+sentinel:///robots", "redis+sentinel://one:x/robots", "http://one"]
)
def test_a_wrong_address_is_reported_with_the_right_forms(url: str) -> None:
    with pytest.raises(QueueUnavailable, match=r"redis\+sentinel://host:port,host:port/service"):
        connect(url)


@pytest.mark.parametrize("scheme", ["redis", "redis+sentinel"])
def test_a_wrong_address_does_not_show_a_part_of_the_password(scheme: str) -> None:
    with pytest.raises(QueueUnavailable, match=r"percent-encode / # \? @ in the password") as caught:
        connect(f"{scheme}://ann:hidden/word@one:26379/robots")
    assert "hidden" not in str(caught.value)
    assert caught.value.__suppress_context__  # nor in a traceback


@pytest.mark.parametrize(
    ("url", "replicas", "expected"),
    [
        ("redis://one", None, 0),
        ("redis://one", 2, 2),
        ("redis+sentinel://one/robots", None, 1),
        ("redis+sentinel://one/robots", 0, 0),
        (None, None, 0),
    ],
)
def test_with_sentinel_one_replica_must_confirm_unless_the_setting_says_otherwise(
    url: str | None, replicas: int | None, expected: int
) -> None:
    settings = ProgramSettings.model_validate({"redis_url": url, "redis_replicas": replicas})
    assert settings.confirming_replicas == expected


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def admin(server: RedisServer) -> Iterator[redis.Redis]:
    """A client that changes the configuration; it is as before at the end."""
    with closing(connect(server.url)) as client:
        names = ("appendonly", "appendfsync", "maxmemory", "maxmemory-policy")
        before = {name: client.config_get(name)[name] for name in names}
        yield client
        for name, value in before.items():
            client.config_set(name, value)


def test_the_embedded_server_needs_no_change(server: RedisServer) -> None:
    assert check_redis(server.url) == []


def test_a_server_that_may_lose_tasks_is_reported_with_the_remedy(server: RedisServer, admin: redis.Redis) -> None:
    admin.config_set("appendfsync", "everysec")
    [warning] = check_redis(server.url)
    assert "CONFIG SET appendfsync always" in warning
    admin.config_set("appendonly", "no")
    [warning] = check_redis(server.url)
    assert "CONFIG SET appendonly yes" in warning
    [_, warning] = check_redis(server.url, replicas=1)
    assert "OPENWORLD_REDIS_REPLICAS is 1" in warning


def test_a_server_that_evicts_tasks_is_refused(server: RedisServer, admin: redis.Redis) -> None:
    admin.config_set("maxmemory", "100mb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(QueueUnsuitable, match="CONFIG SET maxmemory-policy noeviction"):
        check_redis(server.url)
    admin.config_set("maxmemory-policy", "volatile-lru")  # tasks do not expire
    assert check_redis(server.url) == []


def test_a_server_that_is_too_old_is_refused(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_check, "OLDEST", (99, 0))
    with pytest.raises(QueueUnsuitable, match="too old"):
        check_redis(server.url)


def test_a_service_that_hides_its_configuration_is_used(
    server: RedisServer, admin: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    admin.execute_command("ACL", "SETUSER", "guest", "on", ">pw", "~*", "+@all", "-config")
    url = server.url.replace("unix://", "unix://guest:pw@")
    with caplog.at_level(logging.INFO):
        assert check_redis(url) == []
    assert "does not tell its configuration" in caplog.text
    admin.config_set("maxmemory", "100mb")
    admin.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(QueueUnsuitable, match="noeviction"):
        check_redis(url)


def test_a_wrong_password_is_refused_and_an_absent_server_is_not(server: RedisServer, tmp_path: Path) -> None:
    with pytest.raises(QueueUnsuitable, match="correct OPENWORLD_REDIS_URL"):
        check_redis(server.url.replace("unix://", "unix://nobody:pw@"))
    assert check_redis(f"unix://{tmp_path}/absent.sock") == []


@pytest.mark.parametrize("binary", REDIS_SERVERS)
def test_a_server_that_is_read_only_for_a_moment_is_asked_again(tmp_path: Path, binary: Path) -> None:
    with (
        RedisServer(tmp_path / "redis", binary) as running,
        closing(connect(running.url)) as client,
        closing(connect(running.url)) as admin,
    ):
        queue = TaskQueue(client, PREFIX)
        queue.submit(make_task("a"))
        admin.replicaof("127.0.0.1", 1)  # a primary that does not exist
        promotion = threading.Timer(0.3, lambda: admin.replicaof("NO", "ONE"))
        promotion.start()
        assert queue.submit(make_task("b")).fresh
        promotion.join()
        assert len(queue.list_tasks()) == 2


def test_a_server_that_stays_read_only_is_reported(server: RedisServer, admin: redis.Redis) -> None:
    admin.replicaof("127.0.0.1", 1)
    try:
        with closing(connect(server.url)) as client, pytest.raises(QueueUnavailable, match="read only"):
            TaskQueue(client, PREFIX).submit(make_task("a"))
    finally:
        admin.replicaof("NO", "ONE")
