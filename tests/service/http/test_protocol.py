"""The connections of a server: which is closed when there are too many, and which when its time is over."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from service.http import protocol
from service.http.protocol import Connections, GuardedProtocol

GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n"


class App:
    """Answers after `go`, without reading the body."""

    def __init__(self, size: int = 2) -> None:
        self.go, self._size = asyncio.Event(), size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.go.wait()
        headers = [(b"content-length", str(self._size).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for start in range(0, self._size, 2**20):
            more = start + 2**20 < self._size
            await send({"type": "http.response.body", "body": bytes(min(2**20, self._size - start)), "more_body": more})


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.body = b""  # of the last response

    async def ask(self, request: bytes) -> bytes:
        """The status line of the response; nothing if the connection was closed."""
        self._writer.write(request)
        return await self.read()

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def close(self) -> None:
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()

    async def read(self) -> bytes:
        try:
            head = await asyncio.wait_for(self._reader.readuntil(b"\r\n\r\n"), 30)
            self.body = await self._reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""
        return head.split(b"\r\n")[0]


class Running:
    """A listening socket whose connections use the protocol."""

    def __init__(self, port: int, connections: Connections, closed: Counter[str]) -> None:
        self._port, self.connections, self.closed = port, connections, closed
        self.clients: list[Client] = []

    async def connect(self) -> Client:
        count = len(self.connections.open)
        client = Client(*await asyncio.open_connection("127.0.0.1", self._port))
        self.clients.append(client)
        while len(self.connections.open) == count < self.connections.limit:
            await asyncio.sleep(0)
        return client

    def sweep(self, later: float) -> None:
        """Sweep as if `later` seconds had passed."""
        self.connections.sweep(asyncio.get_running_loop().time() + later)


@asynccontextmanager
async def running(app: App, limit: int) -> AsyncIterator[Running]:
    loop, closed = asyncio.get_running_loop(), Counter[str]()
    connections = Connections(limit, 10, 75, lambda reason: closed.update([reason]))
    config = uvicorn.Config(app, log_config=None, access_log=False)
    make = partial(GuardedProtocol, connections, config=config, server_state=ServerState(), app_state={}, _loop=loop)
    server = await loop.create_server(make, "127.0.0.1", 0)
    started = Running(server.sockets[0].getsockname()[1], connections, closed)
    try:
        yield started
    finally:
        server.close()
        for client in started.clients:
            await client.close()
        while connections.open:
            await asyncio.sleep(0.01)


def test_a_connection_is_refused_only_if_all_have_a_request_in_progress(caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        app = App()
        async with running(app, limit=2) as server:
            first, second = await server.connect(), await server.connect()
            first.send(GET)
            second.send(GET)
            while server.connections.new:
                await asyncio.sleep(0)
            refused = await server.connect()
            assert await refused.read() == b"HTTP/1.1 503 Service Unavailable"
            problem = json.loads(refused.body)
            [line] = [record for record in caplog.records if record.name == "openworld.requests"]
            assert vars(line)["fields"] == {"status": 503, "code": problem["code"], "request_id": problem["request_id"]}
            app.go.set()
            assert await first.read() == await second.read() == b"HTTP/1.1 200 OK"
            third = await server.connect()  # in place of the first, which has waited longer
            assert await first.ask(GET) == b""
            assert await third.ask(GET) == await second.ask(GET) == b"HTTP/1.1 200 OK"
            assert server.closed == {"refused": 1, "evicted": 1}

    asyncio.run(check())


def test_connections_without_a_request_are_closed_before_used_ones() -> None:
    async def check() -> None:
        app = App()
        app.go.set()
        async with running(app, limit=2) as server:
            used = await server.connect()
            assert await used.ask(GET) == b"HTTP/1.1 200 OK"
            for _ in range(5):
                await server.connect()
            assert await used.ask(GET) == b"HTTP/1.1 200 OK"
            assert server.closed == {"evicted": 4}

    asyncio.run(check())


def test_a_server_that_stops_answers_the_first_request_of_a_new_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        delayed, loop = list[Callable[[], object]](), asyncio.get_running_loop()
        call_later = loop.call_later

        def collect(seconds: float, call: Callable[..., object], *given: object, **more: Any) -> object:
            if seconds == protocol.LAST_SECONDS:
                return delayed.append(call)
            return call_later(seconds, call, *given, **more)

        monkeypatch.setattr(loop, "call_later", collect)
        app = App()
        app.go.set()
        async with running(app, limit=3) as server:
            used, new = await server.connect(), await server.connect()
            assert await used.ask(GET) == b"HTTP/1.1 200 OK"
            silent = await server.connect()
            for connection in list(server.connections.open):
                connection.shutdown()
            assert await used.ask(GET) == b""
            assert await new.ask(GET) == b"HTTP/1.1 200 OK"
            assert len(delayed) == len(server.connections.open) == 2
            for shutdown in delayed:  # LAST_SECONDS later
                shutdown()
            assert await silent.read() == b""

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(b"", 10), (b"GET / HTTP", 10), (GET, 75), (GET + b"GET", 10), (POST, 30), (POST + b"0123456789", 75)],
)
def test_a_client_has_a_time_to_send_what_is_expected(sent: bytes, seconds: float) -> None:
    async def check() -> None:
        app = App()
        app.go.set()
        async with running(app, limit=2) as server:
            client = await server.connect()
            for part in (sent[: len(GET)], sent[len(GET) :]) if sent.startswith(GET) else (sent,):
                client.send(part)
                if part in (GET, POST, POST + b"0123456789"):
                    assert await client.read() == b"HTTP/1.1 200 OK"
                await asyncio.sleep(0.05)
            server.sweep(seconds / 2)
            assert len(server.connections.open) == 1
            server.sweep(seconds + 1)
            assert not server.connections.open
            assert await client.read() == b""
            assert server.closed == {"timeout": 1}

    asyncio.run(check())


def test_a_client_that_does_not_read_its_response_is_disconnected() -> None:
    async def check() -> None:
        app = App(size=64 * 2**20)
        app.go.set()
        async with running(app, limit=2) as server:
            client = await server.connect()
            client.send(GET)
            while not server.connections.blocked:
                await asyncio.sleep(0.01)
            server.sweep(protocol.WRITE_SECONDS / 2)
            assert len(server.connections.open) == 1
            server.sweep(protocol.WRITE_SECONDS + 1)
            assert await client.read() == b""

    asyncio.run(check())


def test_a_request_in_progress_has_no_deadline_of_its_connection() -> None:
    async def check() -> None:
        app = App()
        async with running(app, limit=2) as server:
            client = await server.connect()
            client.send(GET)
            while server.connections.new:
                await asyncio.sleep(0)
            server.sweep(1e6)
            app.go.set()
            assert await client.read() == b"HTTP/1.1 200 OK"

    asyncio.run(check())
