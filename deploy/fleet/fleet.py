"""The whole fleet: what is started in which order, with which settings, and ended in the reverse order."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.request import urlopen

from deploy.fleet.balancer import start_balancer
from deploy.fleet.monitoring import start_prometheus
from deploy.fleet.object_store import SeaweedFS, environment_of
from deploy.fleet.programs import (
    FleetError,
    Process,
    free_ports,
    kill_process,
    missing_programs,
    start_process,
    stop_processes,
    wait_for,
)
from deploy.fleet.replicated_redis import ReplicatedRedis, replicated_redis
from tasks.queue import connect
from tasks.queue.queue import GROUP

SERVERS, TRAINERS = 3, 2
STORE = "s3://openworld/fleet"
Start = Callable[[str, Path, Path, dict[str, str]], Process]  # program, data folder, log, environment


def start_openworld(program: str, data: Path, log: Path, environment: dict[str, str]) -> Process:
    """Start `openworld <program> --data <data>`."""
    command = [sys.executable, "-m", "openworld", program, "--data", str(data)]
    return start_process(command, log.parent, environment, log=log.name)


@dataclass
class Member:
    """A server or a trainer, as on a machine of its own: it has a port and a data folder that is empty at first."""

    name: str
    program: str  # serve or train
    port: int  # of the API, or of a trainer's metrics
    data: Path
    log: Path
    process: Process | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None, f"{self.name} was not started"
        return self.process.pid

    @property
    def runs(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Fleet:
    """All parts in one folder, as a context manager that ends what was started."""

    def __init__(
        self,
        folder: Path,
        port: int | None = None,
        environment: Mapping[str, str] = os.environ,
        start: Start = start_openworld,
    ) -> None:
        if missing := missing_programs():
            raise FleetError("\n".join(missing))
        self.folder, self._start, self._environment = folder.absolute(), start, dict(environment)
        balancer, self.prometheus_port, *ports = free_ports(2 + SERVERS + TRAINERS)
        self.port = port or balancer
        names = [("serve", f"server-{n + 1}") for n in range(SERVERS)]
        names += [("train", f"trainer-{n + 1}") for n in range(TRAINERS)]
        self.members = [
            Member(name, program, own, self.folder / name / "data", self.folder / name / "log")
            for (program, name), own in zip(names, ports, strict=True)
        ]
        self.store = SeaweedFS(self.folder / "seaweedfs")
        self._redis: ReplicatedRedis | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def url(self) -> str:
        """The address of the balancer."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def servers(self) -> list[Member]:
        return [member for member in self.members if member.program == "serve"]

    @property
    def trainers(self) -> list[Member]:
        return [member for member in self.members if member.program == "train"]

    @property
    def redis(self) -> ReplicatedRedis:
        assert self._redis is not None, "call start_services first"
        return self._redis

    @property
    def environment(self) -> dict[str, str]:
        """What all servers and trainers have in common, and what a command needs that works on the store."""
        own = {"OPENWORLD_STORE": STORE, "OPENWORLD_REDIS_URL": self.redis.url}
        return self._environment | environment_of(self.store.port) | own

    def start(self) -> None:
        self.start_services()
        self.start_programs()

    def start_services(self) -> None:
        """Start the object store and Redis."""
        self._stack.enter_context(self.store)
        self._redis = self._stack.enter_context(replicated_redis(self.folder / "redis"))

    def start_programs(self) -> None:
        """Start servers and trainers, and the balancer and Prometheus on top of them."""
        self._stack.callback(lambda: stop_processes([one.process for one in self.members if one.process]))
        for member in self.members:
            self.start_member(member)
        for member in self.servers:
            self.wait_until_ready(member)
        servers, trainers = [one.port for one in self.servers], [one.port for one in self.trainers]
        balancer = start_balancer(self.folder / "nginx", self.port, servers)
        self._stack.callback(lambda: stop_processes([balancer]))
        prometheus = start_prometheus(self.folder / "prometheus", self.prometheus_port, servers, trainers)
        self._stack.callback(lambda: stop_processes([prometheus]))

    def start_member(self, member: Member) -> None:
        """Start a server or a trainer, again if it was killed."""
        environment = self.environment | {"OPENWORLD_DATA": str(member.data)}
        if member.program == "serve":
            environment |= {
                "OPENWORLD_PORT": str(member.port),
                "OPENWORLD_SERVE_THREADS": "1",
                "OPENWORLD_SERVE_SHARED": "recent,inbox,rates",
                "OPENWORLD_SERVE_ADVERTISE": member.url,
                "OPENWORLD_SERVE_TRUSTED_PROXIES": "127.0.0.1",
            }
        else:
            environment |= {"OPENWORLD_TRAIN_METRICS_PORT": str(member.port), "OPENWORLD_TRAIN_THREADS": "1"}
        member.log.parent.mkdir(parents=True, exist_ok=True)
        member.process = self._start(member.program, member.data, member.log, environment)

    def wait_until_ready(self, server: Member) -> None:
        wait_for(server.name, lambda: serving(server) is not None, server.log, server.process)

    def active_trainer(self) -> Member | None:
        """The trainer that has the lease of a task."""
        with closing(connect(self.redis.url)) as client:
            for stream in client.scan_iter("openworld:*:tasks"):
                for lease in client.xpending_range(stream, GROUP, "-", "+", 1):
                    pid = str(lease["consumer"]).rpartition("-")[2]
                    return next((one for one in self.trainers if one.runs and str(one.pid) == pid), None)
        return None

    def kill(self, member: Member) -> None:
        """End a server or a trainer with SIGKILL."""
        assert member.process is not None
        kill_process(member.process)


def serving(server: Member) -> int | None:
    """The version that a server answers with, None if it is not ready."""
    try:
        with urlopen(f"{server.url}/readyz", timeout=5) as answer:
            return int(json.load(answer)["version"])
    except OSError:
        return None
