"""Ports of this machine."""

import os
import socket

from deploy.fleet import programs

WORKERS = 16  # that have ports of their own


def use_own_ports() -> None:
    """Give this worker of pytest-xdist a range of its own: no other takes a port before its program listens on it."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    programs.PORTS = programs.PORTS[worker % WORKERS :: WORKERS]


def free_port() -> int:
    [port] = programs.free_ports(1)
    return port


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
