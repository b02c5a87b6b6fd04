"""`openworld up`: server, trainer and queue on this machine, started and kept running by one command."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from models.errors import OpenWorldError
from models.files import file_lock, make_folder
from models.versions.data_format import open_data_folder
from openworld import address, logs
from openworld.commands import learn, require_packages
from openworld.environment import settings_from
from openworld.up.child_process import ChildProcess
from openworld.up.embedded_redis import EmbeddedRedis, find_binary, redis_url, socket_path
from openworld.up.supervisor import Program, Supervisor
from openworld.up.welcome import wait_until_ready, welcome
from service.settings import ServiceSettings
from trainer.data_folder import check_folder_settings
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SUMMARY = "start everything on this machine: server, trainer and queue"
EPILOG = """\
examples:
  openworld up
  openworld up --data robot --port 8080
  OPENWORLD_REDIS_URL=redis://10.0.0.7:6379 openworld up    with your own Redis

Ctrl-C stops it; the next start with the same data folder continues from there. A process that ends is started again,
after a pause of 0.5 to 30 seconds. The settings of `serve` and `train` are environment variables: docs/settings.md.
"""

CODE = Path(__file__).resolve().parents[2]
LOCK_SECONDS = 5.0  # for the children of a killed `up` to end
STOP_MARGIN_SECONDS = 10.0  # for a child to end, in addition to the time that its settings allow for requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    address.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    require_packages("all", "fastapi", "uvicorn", "redis", "prometheus_client", *learn.REQUIRED_PACKAGES)
    # The children read the settings too; read all of them here to report an error before anything starts.
    given: dict[str, Any] = {"data": arguments.data, "host": arguments.host, "port": arguments.port}
    server, worker = settings_from(ServiceSettings, given), settings_from(WorkerSettings, {"data": given["data"]})
    learner = settings_from(LearnerSettings, {})
    # A new folder is made after all checks, and its server records what it keeps: a refused start decides nothing.
    storage, exists = server.open_storage(), server.data.is_dir()
    if exists:
        open_data_folder(storage)
    check_folder_settings(storage, learner)
    if server.redis_url is None:
        find_binary()
    else:
        _check_address(server.redis_url.get_secret_value())
    with ExitStack() as stack:
        # Locked before the ports are looked at: the children of a killed `up` may have both for a few seconds.
        lock = stack.enter_context(_lock_folder(server.data)) if exists else None
        # A free port is chosen here, so that a restarted server keeps it.
        with address.bind(server.host, server.port) as probe:
            server = server.model_copy(update={"port": probe.getsockname()[1]})
        stream = _set_up_logs(server)
        worker = worker.model_copy(update={"metrics_port": _metrics_port(worker)})
        make_folder(server.data)
        if lock is None:
            lock = stack.enter_context(_lock_folder(server.data))
        open_data_folder(storage)
        redis_socket = None if server.redis_url else stack.enter_context(socket_path(server.data / "redis"))
        return asyncio.run(_supervisor(server, worker, redis_socket, lock, stream).run())


def _check_address(url: str) -> None:
    """QueueUnavailable if it is not an address of Redis. Nothing is connected: the server may start later."""
    from tasks.queue import connect  # imported here: the parser of the other commands needs no Redis

    connect(url).close()


def _set_up_logs(server: ServiceSettings) -> logs.LogStream:
    """The stream of all programs' logs."""
    style = logs.resolve_style(server.log_format)
    stream = logs.LogStream(sys.stderr, style, ["up", "redis", "server", "trainer"])
    logs.set_up(server.log_level, style, logs.LogStreamHandler(stream, "up"))
    return stream


def _metrics_port(worker: WorkerSettings) -> int:
    """The port of the trainer's metrics, 0 for none: a free one if the default port is in use.

    OpenWorldError if a port that was chosen is in use.
    """
    try:
        address.bind(worker.metrics_host, worker.metrics_port, "OPENWORLD_TRAIN_METRICS_PORT, 0 for none").close()
        return worker.metrics_port
    except OpenWorldError:
        if "metrics_port" in worker.model_fields_set:
            raise
    with address.bind(worker.metrics_host, 0, "OPENWORLD_TRAIN_METRICS_HOST") as probe:
        free: int = probe.getsockname()[1]
    log.warning(
        "port %d is in use: the trainer's metrics are on port %d; choose one with OPENWORLD_TRAIN_METRICS_PORT",
        worker.metrics_port,
        free,
    )
    return free


@contextmanager
def _lock_folder(data: Path) -> Iterator[int]:
    """Hold the data folder for one `openworld up` and its children, which inherit the yielded descriptor."""
    path = data / ".up.lock"
    with ExitStack() as stack:
        try:
            descriptor = stack.enter_context(file_lock(path, LOCK_SECONDS, shared_with_children=True))
        except TimeoutError:
            raise OpenWorldError(
                f"{data} is in use by another `openworld up`{_holder(path)}: "
                "use that one, stop it first, or give another folder with --data"
            ) from None
        path.write_text(str(os.getpid()))
        yield descriptor


def _holder(path: Path) -> str:
    """The process that wrote the lock file, empty if it has ended: then its children hold the lock."""
    pid = path.read_text()
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        pass  # a process of another user
    except (OSError, ValueError):
        return ""
    return f" (pid {pid})"


def _supervisor(
    server: ServiceSettings, worker: WorkerSettings, redis_socket: Path | None, lock: int, stream: logs.LogStream
) -> Supervisor:
    """`redis_socket` is the socket of the embedded Redis server, None with an own Redis."""
    environment = {
        **os.environ,
        # The children write to a pipe and cannot detect a terminal.
        "OPENWORLD_LOG_FORMAT": logs.resolve_style(server.log_format),
        # The children run this code; -P keeps a `models` in the working directory out.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")])),
    }
    queue: list[Program] = []
    if redis_socket is not None:
        environment["OPENWORLD_REDIS_URL"] = redis_url(redis_socket)
        queue = [EmbeddedRedis(server.data / "redis", redis_socket, partial(stream.write, "redis"), [lock])]

    async def ready() -> None:
        version = await wait_until_ready(server.host, server.port)
        with suppress(OSError, ValueError):  # stdout is closed
            print(welcome(server, worker, version), flush=True)

    openworld = [sys.executable, "-P", "-m", "openworld"]
    # By default the trainer leaves one core to the server.
    threads = os.environ.get("OPENWORLD_TRAIN_THREADS") or str(max(1, (os.cpu_count() or 1) - 1))
    children = [
        # The server starts first: the trainer uses all cores while it loads torch.
        ChildProcess(
            "server",
            [*openworld, "serve", "--data", str(server.data), "--host", server.host, "--port", str(server.port)],
            environment,
            partial(stream.write, "server"),
            ready=ready,
            pass_fds=[lock],
        ),
        ChildProcess(
            "trainer",
            [*openworld, "train", "--data", str(server.data)],
            {
                **environment,
                "OPENWORLD_TRAIN_THREADS": threads,
                "OPENWORLD_TRAIN_METRICS_PORT": str(worker.metrics_port),
            },
            partial(stream.write, "trainer"),
            pass_fds=[lock],
        ),
    ]
    grace = server.drain_seconds + server.shutdown_seconds + STOP_MARGIN_SECONDS
    return Supervisor([queue, children], grace=grace)
