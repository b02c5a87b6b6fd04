"""The address that a process listens on: the options of the server's address, and a bound socket."""

from __future__ import annotations

import argparse
import socket

from models.errors import OpenWorldError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (default: OPENWORLD_HOST, else 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, help="port to listen on; 0 takes a free one (default: OPENWORLD_PORT, else 8000)"
    )


def bind(host: str, port: int, options: str = "--host and --port") -> socket.socket:
    """A bound socket that does not listen: connections are refused. OpenWorldError names the options to change."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise OpenWorldError(
            f"cannot listen on {host}, port {port} ({error.strerror or error}): choose another with {options}"
        ) from error
    return listener
