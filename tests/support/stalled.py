"""Requests that a server has admitted, and that then stop sending their body."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from urllib.parse import urlsplit

ADMITTED = b"HTTP/1.1 100 Continue\r\n\r\n"
SECONDS = 30.0  # that a test waits for an answer


@contextmanager
def connection_to(url: str, sent: bytes = b"") -> Iterator[socket.socket]:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=SECONDS) as connection:
        connection.sendall(sent)
        yield connection


def request_head(url: str, method: str, path: str, *, key: str = "", kind: str = "application/json") -> bytes:
    """The head of a request whose body is to be sent when the server asks for it."""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: {urlsplit(url).netloc}\r\nX-API-Key: {key}\r\nContent-Type: {kind}\r\n"
        "Content-Length: 1000000\r\nExpect: 100-continue\r\n\r\n"
    ).encode()


@contextmanager
def stalled_request(
    url: str, method: str, path: str, *, key: str = "", kind: str = "application/json", sent: bytes = b"{" * 60
) -> Iterator[socket.socket]:
    """A request that holds its permits: the server has asked for the body, and got only `sent`.

    A refused request is repeated: those of an earlier test may not have been released yet.
    """
    head, end = request_head(url, method, path, key=key, kind=kind), time.monotonic() + SECONDS
    while True:
        with connection_to(url, head) as connection:
            answered = connection.recv(len(ADMITTED), socket.MSG_WAITALL)
            if answered == ADMITTED:
                connection.sendall(sent)
                yield connection
                return
        assert time.monotonic() < end, answered
        time.sleep(0.02)


def answer_of(connection: socket.socket) -> tuple[int, str]:
    """Status and code of the response; (0, "") if the connection is closed without one."""
    try:
        with HTTPResponse(connection) as response:
            response.begin()
            return response.status, json.loads(response.read()).get("code", "")
    except TimeoutError:
        return -1, "no answer"
    except (OSError, ValueError, HTTPException):
        return 0, ""
