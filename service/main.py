"""The server process.

On SIGTERM the server reports "not ready" at once, so that load balancers send it no new requests. It answers for
another `drain_seconds` and asks clients to close their connections. Then it stops listening, and exits after every
accepted request is answered. A second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import signal
import socket
from functools import partial
from types import FrameType
from typing import Any, cast
from urllib.parse import urlsplit

import uvicorn

from models.errors import OpenWorldError
from service.app import create_app
from service.container import Container
from service.http.protocol import Connections, GuardedProtocol
from service.memory import return_large_blocks
from service.settings import ServiceSettings, is_loopback
from tasks.queue import check_redis

log = logging.getLogger(__name__)

BACKLOG = 1024  # connections that wait to be accepted; many are accepted at once, before any is closed
OTHER_DESCRIPTORS = 256  # of versions, images, spooled batches, the inbox and Redis
KEEP_ALIVE = 75  # seconds: longer than clients and proxies keep a connection, so that they close it first


class Server(uvicorn.Server):
    """uvicorn with a pause between "not ready" and "not listening"."""

    def __init__(self, config: uvicorn.Config, container: Container, connections: Connections) -> None:
        super().__init__(config)
        self._container, self._connections = container, connections

    async def on_tick(self, counter: int) -> bool:
        if counter % 2 == 0:  # every 0.2 seconds
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._container.draining:
            self.should_exit = self.force_exit = True
            return
        self._container.draining = True
        log.info("%s: not ready, will stop listening", signal.Signals(sig).name)
        loop = asyncio.get_event_loop()
        loop.call_soon_threadsafe(loop.call_later, self._container.settings.drain_seconds, self._stop)

    def _stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            for server in self.servers:
                for listener in server.sockets:
                    host, port, *_ = listener.getsockname()
                    log.info("listening on http://%s:%d", f"[{host}]" if ":" in host else host, port)


def reserve_descriptors(connections: int) -> int:
    """Raise the limit on open files for this number of connections; returns how many there may be."""
    needed = connections + BACKLOG + OTHER_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    allowed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == needed:
        return connections
    fewer = max(8, allowed - OTHER_DESCRIPTORS) // 2  # as many again may wait to be accepted
    log.warning(
        "the limit of %d open files allows %d connections, not %d: raise it (ulimit -n)", hard, fewer, connections
    )
    return fewer


def reachable_address(host: str, port: int) -> str:
    """The address for other servers: that of this machine, if the server listens on all."""
    if host in ("0.0.0.0", "::"):
        try:
            host = socket.gethostbyname(socket.gethostname())
        except OSError:
            host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def advertised_address(settings: ServiceSettings, port: int) -> str:
    """The address that other servers forward to; OpenWorldError if it would lead them to themselves."""
    if settings.advertise:
        return settings.advertise
    address = reachable_address(settings.host, port)
    found = urlsplit(address).hostname or ""
    if "inbox" in settings.shared and is_loopback(found) and not is_loopback(settings.host):
        raise OpenWorldError(
            f"the name of this machine leads to {found}, at which other servers cannot reach it: set "
            f"OPENWORLD_SERVE_ADVERTISE=http://<address of this machine>:{port}"
        )
    return address


def serve(settings: ServiceSettings, listener: socket.socket) -> int:
    """Run until a signal; returns the exit code. `listener` is bound: it listens when the model is loaded."""
    address = advertised_address(settings, listener.getsockname()[1])
    if settings.redis_url is not None:
        check_redis(settings.redis_url.get_secret_value(), settings.confirming_replicas)
    app = create_app(settings)
    container: Container = app.state.container
    container.address = address
    metrics = container.metrics
    limit = reserve_descriptors(settings.max_connections)
    connections = Connections(
        limit,
        settings.header_timeout,
        KEEP_ALIVE,
        on_close=lambda reason: metrics.connections_closed.labels(reason).inc(),
    )
    metrics.connections.set_function(lambda: len(connections.open))
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=cast(type[asyncio.Protocol], partial(GuardedProtocol, connections)),
        backlog=min(BACKLOG, limit),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,  # see service/http/forwarded.py
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.shutdown_seconds) or 1,
    )
    log.info("settings that differ from the defaults", extra={"fields": settings.changed()})
    log.debug("settings", extra={"fields": settings.shown()})
    server = Server(config, container, connections)
    return_large_blocks()
    # Imported objects stay, and requests leave few cycles: rarer garbage collection saves some percent.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    server.run(sockets=[listener])
    return 0 if server.started else 1
