"""`openworld up` starts the service within seconds, and restarts every process that is killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import psutil
import pytest
import redis

from models.errors import OpenWorldError
from models.files import file_lock
from openworld.commands import up as up_command
from tasks.queue import connect
from tests.support.paths import ROOT
from tests.support.redis_servers import RedisServer
from tests.support.servers import known_image, learned_folder, novel_image, wait_until
from tests.support.settings import clean_environment, variables
from trainer.worker.settings import WorkerSettings

PARTS = ("serve", "train", "redis")


def environment(**settings: object) -> dict[str, str]:
    ours = variables(**{"metrics_port": 0, "drain_seconds": 0.1, "threads": 1, **settings})
    # The tests run in a checkout that need not be the one that is installed.
    return clean_environment() | {"PYTHONPATH": str(ROOT)} | ours


def command(data: str | Path, port: int = 0) -> list[str]:
    return [sys.executable, "-m", "openworld", "up", "--data", str(data), "--port", str(port)]


def refused(data: Path, port: int = 0, **settings: object) -> str:
    """The error message of an `up` that does not start."""
    done = subprocess.run(
        command(data, port), env=environment(**settings), capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    return done.stderr


class Running:
    """`openworld up` in its own process."""

    def __init__(self, process: subprocess.Popen[bytes], out: Path, log: Path) -> None:
        self.process, self.out, self.log = process, out, log
        wait_until(lambda: "Ctrl-C" in out.read_text() or process.poll() is not None, 60)
        assert process.poll() is None, log.read_text()
        console = re.search(r"console +(\S+)", out.read_text())
        assert console
        self.url = console[1]

    def pid_of(self, part: str) -> int | None:
        for child in psutil.Process(self.process.pid).children():
            try:
                found = child.name().endswith("-server") if part == "redis" else part in child.cmdline()
                if found and child.status() != psutil.STATUS_ZOMBIE:
                    return child.pid
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        return None

    def part(self, name: str) -> psutil.Process:
        return psutil.Process(wait_until(lambda: self.pid_of(name)))

    def kill(self, name: str) -> None:
        """Kill a child and wait for its replacement."""
        before = self.part(name).pid
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: self.pid_of(name) not in (None, before))

    @property
    def redis_url(self) -> str:
        return str(self.part("serve").environ()["OPENWORLD_REDIS_URL"])

    def redis(self, *command: str) -> Any:
        with closing(connect(self.redis_url)) as client:
            return client.execute_command(*command)

    def redis_answers(self) -> bool:
        try:
            return self.redis("PING") in (True, "PONG")
        except redis.RedisError:
            return False

    def predict(self, image: bytes) -> dict[str, Any]:
        response = httpx.post(f"{self.url}/predict", content=image, timeout=30)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()["predictions"][0]
        return answer

    def answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def trainer_waits_for_work(self) -> bool:
        with closing(connect(self.redis_url)) as client:
            return any(one["cmd"] == "xread" for one in client.client_list())

    def end(self, how: int = signal.SIGINT) -> int:
        """Send a signal and return the exit code; no child is left."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(how)
        code = self.process.wait(60)
        _, left = psutil.wait_procs(family, 20)
        assert not [one for one in left if one.status() != psutil.STATUS_ZOMBIE]
        return code


@contextmanager
def up(data: str | Path, outputs: Path, cwd: Path | None = None, **settings: object) -> Iterator[Running]:
    outputs.mkdir(exist_ok=True)
    out, log = outputs / "stdout", outputs / "stderr"
    with out.open("wb") as stdout, log.open("wb") as stderr:
        process = subprocess.Popen(command(data), env=environment(**settings), cwd=cwd, stdout=stdout, stderr=stderr)
    try:
        yield Running(process, out, log)
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def robot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """`up` on a folder with versions, whose path has spaces and is too long for a socket."""
    root = tmp_path_factory.mktemp("up")
    with up(learned_folder(root / f"my robot's {'long ' * 20}folder"), root / "outputs") as running:
        yield running
        assert running.end(signal.SIGTERM) == 0


def test_it_serves_the_current_version_and_prints_it(robot: Running) -> None:
    assert robot.predict(known_image("class 0"))["label"] == "class 0"
    assert robot.predict(novel_image(1))["version"] == 3
    assert "3, with 5 classes" in robot.out.read_text()


def test_a_killed_server_is_restarted_at_its_address(robot: Running) -> None:
    robot.kill("serve")
    wait_until(robot.answers, 60)
    assert robot.predict(known_image("class 0"))["label"] == "class 0"


def test_a_killed_redis_is_restarted_at_its_address_with_its_data(robot: Running) -> None:
    robot.redis("SET", "kept", "yes")
    url = robot.redis_url
    robot.kill("redis")
    wait_until(robot.redis_answers)
    assert robot.redis_url == url
    assert robot.redis("GET", "kept") == "yes"


def test_a_killed_trainer_is_restarted(robot: Running) -> None:
    wait_until(robot.trainer_waits_for_work, 60)
    robot.kill("train")
    wait_until(lambda: not robot.trainer_waits_for_work())  # loading PyTorch takes seconds
    wait_until(robot.trainer_waits_for_work, 60)


def test_no_secret_is_on_a_command_line_and_every_log_line_is_json(robot: Running) -> None:
    for part in PARTS:
        assert "unix://" not in " ".join(robot.part(part).cmdline())
    wait_until(lambda: '"program": "server"' in robot.log.read_text())
    programs = {json.loads(line)["program"] for line in robot.log.read_text().splitlines()}
    assert {"up", "server"} <= programs <= {"up", "redis", "server", "trainer"}


def test_a_folder_has_one_up(robot: Running) -> None:
    data = Path(robot.part("serve").cmdline()[-5])
    message = refused(data)
    assert message == (
        f"error: {data} is in use by another `openworld up` (pid {robot.process.pid}): "
        "use that one, stop it first, or give another folder with --data\n"
    )
    assert robot.answers()


def test_an_empty_folder_is_served_and_again_after_ctrl_c_and_after_a_kill(tmp_path: Path) -> None:
    with up("new robot", tmp_path / "outputs", cwd=tmp_path) as running:
        answer = running.predict(novel_image(1))
        assert (answer["novel"], answer["version"]) == (True, 0)
        printed = running.out.read_text()
        assert f"openworld teach FOLDER --url {running.url}" in printed
        assert str(tmp_path / "new robot") in printed
        assert httpx.get(f"{running.url}/docs", timeout=30).status_code == 200
        running.redis("SET", "kept", "yes")
        assert running.end(signal.SIGINT) == 0
    with up("new robot", tmp_path / "outputs", cwd=tmp_path) as running:
        assert running.redis("GET", "kept") == "yes"
        assert running.end(signal.SIGKILL) == -signal.SIGKILL
    with up("new robot", tmp_path / "outputs", cwd=tmp_path) as running:
        assert running.redis("GET", "kept") == "yes"
        assert running.predict(novel_image(1))["novel"]


def test_an_own_redis_is_used_and_left_running(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "own") as own:
        with up(tmp_path / "robot", tmp_path / "outputs", redis_url=own.url) as running:
            assert running.redis_url == own.url
            assert running.pid_of("redis") is None
            assert running.end(signal.SIGTERM) == 0
        assert own.alive
        assert not (tmp_path / "robot" / "redis").exists()


def test_the_metrics_of_the_trainer_move_to_a_free_port_if_the_default_one_is_in_use(tmp_path: Path) -> None:
    default = WorkerSettings.model_fields["metrics_port"].default
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # another service has it: in use as well
            taken.bind(("127.0.0.1", default))
            taken.listen()
        with up(tmp_path / "robot", tmp_path / "outputs", metrics_port="") as running:
            shown = re.search(r"trainer: (http://127.0.0.1:(\d+)/metrics)", running.out.read_text())
            assert shown
            assert int(shown[2]) != default
            assert f"port {default} is in use: the trainer's metrics are on port {shown[2]};" in running.log.read_text()
            wait_until(running.trainer_waits_for_work, 60)
            assert "openworld_train_alive" in httpx.get(shown[1], timeout=30).text
            assert running.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(("setting", "remedy"), [("port", "--port"), ("metrics_port", "OPENWORLD_TRAIN_METRICS_PORT")])
def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path, setting: str, remedy: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        message = refused(tmp_path, port) if setting == "port" else refused(tmp_path, **{setting: port})
    assert re.fullmatch(
        rf"error: cannot listen on 127.0.0.1, port {port} \(.* in use\): choose .*{remedy}.*\n", message
    )
    assert not (tmp_path / "redis").exists()


def test_a_redis_folder_that_cannot_be_made_is_reported_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "redis").write_text("a file")
    assert refused(tmp_path) == f"error: [Errno 17] File exists: '{tmp_path / 'redis'}'\n"


def test_the_children_of_a_killed_up_keep_the_folder_without_a_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(up_command, "LOCK_SECONDS", 0)
    ended = subprocess.Popen(["true"])
    ended.wait()
    with file_lock(tmp_path / ".up.lock"):
        for pid, shown in ((ended.pid, ""), (os.getpid(), f" (pid {os.getpid()})"), ("", "")):
            (tmp_path / ".up.lock").write_text(str(pid))
            with (
                pytest.raises(OpenWorldError, match=re.escape(f"by another `openworld up`{shown}: ")),
                up_command._lock_folder(tmp_path),
            ):
                pass


def test_a_configuration_error_of_a_child_stops_all_with_its_message(tmp_path: Path) -> None:
    with RedisServer(tmp_path / "own") as own:
        with closing(connect(own.url)) as client:
            client.config_set("maxmemory", "100mb")
            client.config_set("maxmemory-policy", "allkeys-lru")
        message = refused(tmp_path / "robot", redis_url=own.url, keep="features")
    assert re.search(r"^error: server cannot start: Redis has maxmemory 104857600", message, re.MULTILINE)
    assert not (tmp_path / "robot" / "KEEP").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": ...}, "choose another with --host and --port"),
        ({"metrics_port": ...}, "OPENWORLD_TRAIN_METRICS_PORT"),
        ({"keep": "statistics", "method": "more"}, "the method more replays features"),
        ({"redis_url": "nonsense://somewhere"}, "the address of Redis is wrong"),
    ],
)
def test_a_refused_start_leaves_no_new_folder(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        given = {name: taken.getsockname()[1] if value is ... else value for name, value in settings.items()}
        port = given.pop("port", 0)
        assert message in refused(tmp_path / "robot", port, **({"keep": "features"} | given))
    assert not (tmp_path / "robot").exists()


def test_a_new_folder_records_what_it_keeps_once_it_is_served(tmp_path: Path) -> None:
    with up(tmp_path / "robot", tmp_path / "outputs", keep="features") as running:
        assert (tmp_path / "robot" / "KEEP").read_text() == "features\n"
        assert running.end(signal.SIGTERM) == 0


def test_a_wrong_setting_of_the_trainer_is_reported_at_once(tmp_path: Path) -> None:
    assert refused(tmp_path, epochs=0).startswith("error: OPENWORLD_TRAIN_EPOCHS: ")
    assert not list(tmp_path.iterdir())
