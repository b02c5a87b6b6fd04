"""A Redis primary with replicas and three sentinels, from Debian's packages, with short timeouts."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis

from tests.support.object_stores import free_ports
from tests.support.waiting import wait_until

SERVICE = "openworld"
DOWN_MILLISECONDS = 500  # without an answer, until a sentinel takes the primary for gone

needs_sentinel = pytest.mark.skipif(
    not (shutil.which("redis-server") and shutil.which("redis-sentinel")),
    reason="needs redis-server and redis-sentinel: `make system` installs them on Debian",
)


@dataclass
class ReplicatedRedis:
    """Servers and sentinels by port."""

    folder: Path
    servers: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    sentinels: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    def client(self, port: int) -> redis.Redis:
        return redis.Redis(port=port, decode_responses=True, socket_timeout=2)

    def roles(self) -> dict[int, str]:
        """Port -> role of the servers that answer."""
        found = {}
        for port in self.servers:
            with closing(self.client(port)) as client:
                try:
                    found[port] = str(client.info("replication")["role"])
                except redis.RedisError:
                    continue
        return found

    def primary(self) -> int:
        """The port of the primary, as a sentinel names it."""
        for port in self.sentinels:
            with closing(redis.Redis(port=port, decode_responses=True, socket_timeout=2)) as client:
                _, found = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)
                return int(found)
        raise AssertionError("no sentinel runs")

    def kill_primary(self) -> int:
        port = self.primary()
        self.servers[port].kill()
        self.servers[port].wait(10)
        return port

    def restart_killed(self) -> None:
        """Start the killed servers as replicas of the primary."""
        killed = [port for port, process in self.servers.items() if process.poll() is not None]
        if killed:
            wait_until(lambda: self.primary() not in killed)
        for port in killed:
            self.servers[port] = _start_server(self.folder, port, self.primary())
        self.wait_for_replicas(self.primary())

    def wait_for_replicas(self, primary: int) -> None:
        """Wait until all other servers are in step with the primary."""
        with closing(self.client(primary)) as client:
            wait_until(lambda: _online_replicas(client) == len(self.servers) - 1)


def _online_replicas(client: redis.Redis) -> int:
    info = client.info("replication")
    return sum(isinstance(one, dict) and one.get("state") == "online" for one in info.values())


@contextmanager
def replicated_redis(folder: Path, replicas: int = 2) -> Iterator[ReplicatedRedis]:
    """A primary, its replicas and three sentinels that know each other."""
    running = ReplicatedRedis(folder)
    ports = free_ports(replicas + 4)
    first, servers, sentinels = ports[0], ports[: replicas + 1], ports[replicas + 1 :]
    try:
        for port in servers:
            running.servers[port] = _start_server(folder, port, None if port == first else first)
        wait_until(lambda: first in running.roles())
        running.wait_for_replicas(first)  # before the sentinels look for them, which they do every 10 seconds
        for port in sentinels:
            running.sentinels[port] = _start_sentinel(folder, port, first)
        wait_until(lambda: _sentinels_agree(sentinels, replicas))
        yield running
    finally:
        for process in (*running.sentinels.values(), *running.servers.values()):
            process.send_signal(signal.SIGKILL)
            process.wait(10)


def _start_server(folder: Path, port: int, primary: int | None) -> subprocess.Popen[bytes]:
    place = folder / str(port)
    place.mkdir(exist_ok=True)
    options = {
        "port": port, "bind": "127.0.0.1", "dir": place, "save": "", "appendonly": "yes", "appendfsync": "always",
        "repl-diskless-sync-delay": 0, "repl-ping-replica-period": 1,
    }  # fmt: skip
    command = ["redis-server", *(str(part) for name, value in options.items() for part in (f"--{name}", value))]
    if primary is not None:
        command += ["--replicaof", "127.0.0.1", str(primary)]
    return _start(command, place)


def _start_sentinel(folder: Path, port: int, primary: int) -> subprocess.Popen[bytes]:
    place = folder / str(port)
    place.mkdir()
    (place / "sentinel.conf").write_text(f"""\
port {port}
bind 127.0.0.1
dir {place}
sentinel monitor {SERVICE} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {SERVICE} {DOWN_MILLISECONDS}
sentinel failover-timeout {SERVICE} 3000
sentinel parallel-syncs {SERVICE} 2
""")
    return _start(["redis-sentinel", str(place / "sentinel.conf")], place)


def _start(command: list[str], place: Path) -> subprocess.Popen[bytes]:
    with (place / "log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=place)


def _sentinels_agree(ports: list[int], replicas: int) -> bool:
    """Whether each of them knows the two others and all replicas."""
    for port in ports:
        with closing(redis.Redis(port=port, decode_responses=True, socket_timeout=2)) as client:
            try:
                state = client.sentinel_master(SERVICE)
            except redis.RedisError:
                return False
        if (state["num-other-sentinels"], state["num-slaves"]) != (len(ports) - 1, replicas):
            return False
    return True
