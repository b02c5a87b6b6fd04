"""The commands and health checks of the images, run on this machine with the environment of the image."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest

from tasks.queue import connect
from tests.support.docker import SECRET, STAGES, clean_environment, redis_of_compose
from tests.support.ports import free_port
from tests.support.servers import learned_folder
from tests.support.settings import variables
from tests.support.waiting import wait_until

HEALTH_PAUSE = 1.0  # seconds between two health checks: each starts a process


class Container:
    """The command of an image, run without an engine: with the environment of the image, on free ports."""

    def __init__(self, target: str, log: Path, **settings: object) -> None:
        self._stage, self._log, self.home = STAGES[target], log, log.with_name("home")
        self.home.mkdir()
        scripts = os.pathsep.join([sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ["PATH"]])
        given = variables(**settings)
        # Nothing listens at this proxy: the health check must not use it.
        proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": ""}
        # Hide CI: some libraries behave differently there.
        outside = {name: value for name, value in clean_environment().items() if name not in ("CI", "XDG_CACHE_HOME")}
        own = {"PATH": scripts, "HOME": str(self.home)}
        self._environment = outside | self._stage.environment | given | proxy | own

    def health(self) -> int:
        """Run the health check and return its exit code."""
        command = self._stage.last("HEALTHCHECK").exec_form
        return subprocess.run(
            self._resolved(command), env=self._environment, capture_output=True, timeout=30, check=False
        ).returncode

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        command = [*self._stage.last("ENTRYPOINT").exec_form, *self._stage.last("CMD").exec_form]
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                self._resolved(command), env=self._environment, cwd=self._log.parent, stdout=log, stderr=log
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def wait_until_healthy(self, process: subprocess.Popen[bytes], seconds: float) -> None:
        def healthy() -> bool:
            assert process.poll() is None, self._log.read_text()
            return self.health() == 0

        wait_until(healthy, seconds, HEALTH_PAUSE)

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(getattr(signal, self._stage.last("STOPSIGNAL").value))
        return process.wait(45)

    def _resolved(self, command: list[str]) -> list[str]:
        program = shutil.which(command[0], path=self._environment["PATH"])
        assert program is not None
        return [program, *command[1:]]


def test_the_server_is_healthy_only_while_it_runs(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    port = free_port()
    keys = f"robot:predict:{SECRET}"
    image = Container("server", tmp_path / "log", data=tmp_path / "data", port=port, keys=keys, drain_seconds=0.1)
    assert image.health() == 1, "Docker reserves the other codes"
    with image.running() as process:
        image.wait_until_healthy(process, 60)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30) as client:
            assert client.get("/versions").status_code == 401, "the keys are required"
            assert client.get("/metrics").status_code == 200, "Prometheus sends no key"
        assert image.stop(process) == 0
    assert image.health() == 1
    assert list(image.home.rglob("*")) == [], "nothing may be written here, for example by telemetry"


def test_the_server_refuses_to_start_without_keys(tmp_path: Path) -> None:
    image = Container("server", tmp_path / "log", data=tmp_path, port=free_port())
    with image.running() as process:
        assert process.wait(60) == 2
    assert "OPENWORLD_KEYS" in (tmp_path / "log").read_text()


def test_the_trainer_is_healthy_only_while_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    data = learned_folder(tmp_path / "data")  # an empty one would first export a backbone, for longer than the limit
    with redis_of_compose(tmp_path / "redis") as url:
        given: dict[str, object] = {"metrics_port": free_port(), "redis_url": url, "stall_seconds": 3}
        image = Container("trainer", tmp_path / "log", data=data, **given)
        assert image.health() == 1
        with image.running() as process:
            image.wait_until_healthy(process, 240)
            # The worker waits for a Redis that hangs: its heartbeat stops, while /metrics still answers.
            redis_pid = connect(url).info("server")["process_id"]
            os.kill(redis_pid, signal.SIGSTOP)
            try:
                wait_until(lambda: image.health() == 1, pause=HEALTH_PAUSE)
            finally:
                os.kill(redis_pid, signal.SIGCONT)
            image.wait_until_healthy(process, 40)
            assert image.stop(process) == 0
        assert image.health() == 1
    assert list(image.home.rglob("*")) == []


def test_redis_syncs_every_write_before_it_answers_and_makes_no_snapshots(tmp_path: Path) -> None:
    with redis_of_compose(tmp_path) as url, closing(connect(url)) as client:
        found = client.config_get("appendonly", "appendfsync", "save", "maxmemory-policy")
        wanted = {"appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction"}
        assert found == wanted
