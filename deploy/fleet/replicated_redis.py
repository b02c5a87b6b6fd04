"""A Redis primary with replicas and three sentinels, with short timeouts."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from deploy.fleet.programs import FleetError, free_ports, kill_process, required_program, start_process, wait_for

SERVICE = "openworld"
DOWN_MILLISECONDS = 500  # without an answer, until a sentinel takes the primary for gone


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
                address: Any = client.sentinel_get_master_addr_by_name(SERVICE)
                return int(address[1])
        raise FleetError("no sentinel of Redis runs")

    def kill_primary(self) -> int:
        port = self.primary()
        kill_process(self.servers[port])
        return port

    def restart_killed(self) -> None:
        """Start the killed servers as replicas of the primary."""
        killed = [port for port, process in self.servers.items() if process.poll() is not None]
        if killed:
            wait_for("a new primary of Redis", lambda: self.primary() not in killed)
        for port in killed:
            self.servers[port] = _start_server(self.folder, port, self.primary())
        self.wait_for_replicas(self.primary())

    def wait_for_replicas(self, primary: int) -> None:
        """Wait until all other servers are in step with the primary."""
        with closing(self.client(primary)) as client:
            wait_for("a replica of Redis", lambda: _online_replicas(client) == len(self.servers) - 1)


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
        wait_for("Redis", lambda: first in running.roles(), folder / str(first) / "log")
        running.wait_for_replicas(first)  # before the sentinels look for them, which they do every 10 seconds
        for port in sentinels:
            running.sentinels[port] = _start_sentinel(folder, port, first)
        wait_for("the sentinels of Redis", lambda: _sentinels_agree(sentinels, replicas))
        yield running
    finally:
        for process in (*running.sentinels.values(), *running.servers.values()):
            kill_process(process)


def _start_server(folder: Path, port: int, primary: int | None) -> subprocess.Popen[bytes]:
    place = folder / str(port)
    place.mkdir(parents=True, exist_ok=True)
    options = {
        "port": port, "bind": "127.0.0.1", "dir": place, "save": "", "appendonly": "yes", "appendfsync": "always",
        "repl-diskless-sync-delay": 0, "repl-ping-replica-period": 1,
    }  # fmt: skip
    command = [required_program("redis-server")]
    command += [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    if primary is not None:
        command += ["--replicaof", "127.0.0.1", str(primary)]
    return start_process(command, place)


def _start_sentinel(folder: Path, port: int, primary: int) -> subprocess.Popen[bytes]:
    place = folder / str(port)
    place.mkdir(parents=True)
    (place / "sentinel.conf").write_text(f"""\
port {port}
bind 127.0.0.1
dir {place}
sentinel monitor {SERVICE} 127.0.0.1 {primary} 2
sentinel down-after-milliseconds {SERVICE} {DOWN_MILLISECONDS}
sentinel failover-timeout {SERVICE} 3000
sentinel parallel-syncs {SERVICE} 2
""")
    return start_process([required_program("redis-sentinel"), str(place / "sentinel.conf")], place)


def _sentinels_agree(ports: list[int], replicas: int) -> bool:
    """Whether each of them knows the two others and all replicas."""
    for port in ports:
        with closing(redis.Redis(port=port, decode_responses=True, socket_timeout=2)) as client:
            try:
                state: Any = client.sentinel_master(SERVICE)
            except redis.RedisError:
                return False
        if (state["num-other-sentinels"], state["num-slaves"]) != (len(ports) - 1, replicas):
            return False
    return True
