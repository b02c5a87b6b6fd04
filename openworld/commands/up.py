"""`openworld up`: the whole service on this machine, with one command and nothing else to install or to start."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from models.errors import OpenWorldError
from models.files import make_folder
from models.versions.data_format import open_data_folder
from openworld import logs
from openworld.commands import learn
from openworld.options import settings_from
from openworld.up.child_process import ChildProcess
from openworld.up.claims import free_port, only_one
from openworld.up.log_stream import LogStream, OwnLines
from openworld.up.supervisor import Program, Supervisor
from openworld.up.welcome import until_ready, welcome

if TYPE_CHECKING:
    from openworld.up.embedded_redis import RedisServer
    from service.settings import ServiceSettings
    from trainer.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SUMMARY = "start everything on this machine: server, trainer and queue"
EPILOG = """\
examples:
  openworld up
  openworld up --data robot --port 8080
  OPENWORLD_REDIS_URL=redis://10.0.0.7:6379 openworld up    with a Redis of your own

Ctrl-C stops it; started again with the same folder, it goes on where it was. A part that ends by itself is started
again. The settings of `serve` and `train` are environment variables: docs/settings.md.
"""

EXTRA = ("fastapi", "uvicorn", "redis", "prometheus_client", *learn.EXTRA)
CODE = Path(__file__).resolve().parents[2]
MARGIN = 10.0  # seconds that a part may take to end, beyond those that the settings give to requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (OPENWORLD_HOST, else 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (OPENWORLD_PORT, else 8000; 0: a free one)")


def run(arguments: argparse.Namespace) -> int:
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise OpenWorldError(f"not installed: {', '.join(missing)}. Install them: pip install 'openworld[all]'")
    # Here and not above: the other commands need neither a web server nor a queue.
    from openworld.up.embedded_redis import RedisServer
    from service.settings import ServiceSettings
    from trainer.learning.settings import LearnerSettings
    from trainer.worker.settings import WorkerSettings

    # All settings, although the children read them too: a mistake is best told before anything has started.
    given: dict[str, Any] = {"data": arguments.data.absolute(), "host": arguments.host, "port": arguments.port}
    serving, working = settings_from(ServiceSettings, given), settings_from(WorkerSettings, {"data": given["data"]})
    settings_from(LearnerSettings, {})
    make_folder(serving.data)
    open_data_folder(serving.data)
    with ExitStack() as stack:
        lock = stack.enter_context(only_one(serving.data))
        # A free one is chosen here, so that a server that is started again is where it was.
        port = free_port(serving.host, serving.port, "choose another with --host and --port")
        free_port(
            working.metrics_host, working.metrics_port, "choose another with OPENWORLD_TRAIN_METRICS_PORT, 0 for none"
        )
        serving = serving.model_copy(update={"port": port})
        redis = None if serving.redis_url else stack.enter_context(RedisServer(serving.data / "redis"))
        return asyncio.run(_supervisor(serving, working, redis, lock).run())


def _supervisor(serving: ServiceSettings, working: WorkerSettings, redis: RedisServer | None, lock: int) -> Supervisor:
    text = serving.log_format == "text" or (serving.log_format == "auto" and sys.stderr.isatty())
    style: Literal["text", "json"] = "text" if text else "json"
    stream = LogStream(sys.stderr, style, ["up", "server", "trainer"])
    logs.set_up(serving.log_level, style)
    own = OwnLines(stream, "up")
    own.setFormatter(logs.Text() if text else logs.JsonLines())
    logging.getLogger().handlers[:] = [own]

    environment = _environment(style, redis)
    openworld = [sys.executable, "-P", "-m", "openworld"]
    data = ["--data", str(serving.data)]

    async def ready() -> None:
        version = await until_ready(serving.host, serving.port)
        with suppress(OSError, ValueError):  # nobody reads it
            print(welcome(serving, working, version), flush=True)

    server = ChildProcess(
        "server",
        [*openworld, "serve", *data, "--host", serving.host, "--port", str(serving.port)],
        environment,
        lambda line: stream.write("server", line),
        ready=ready,
        pass_fds=[lock],
    )
    # The trainer leaves a core to the server; and it stands back by itself, see OPENWORLD_TRAIN_NICE.
    threads = os.environ.get("OPENWORLD_TRAIN_THREADS") or str(max(1, (os.cpu_count() or 1) - 1))
    trainer = ChildProcess(
        "trainer",
        [*openworld, "train", *data],
        {**environment, "OPENWORLD_TRAIN_THREADS": threads},
        lambda line: stream.write("trainer", line),
        pass_fds=[lock],
    )
    # The server first: torch takes seconds to load, and the first answer should not have to wait for that.
    queue: list[Program] = [_Redis(redis)] if redis else []
    return Supervisor([queue, [server, trainer]], grace=serving.drain_seconds + serving.shutdown_seconds + MARGIN)


def _environment(style: str, redis: RedisServer | None) -> dict[str, str]:
    environment = {
        **os.environ,
        "OPENWORLD_LOG_FORMAT": style,  # they write into a pipe, and cannot see where it ends
        # The same code as ours, and with -P not a `models` that lies in the folder where `up` was called.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")])),
    }
    if redis is not None:
        environment["OPENWORLD_REDIS_URL"] = redis.url
    return environment


class _Redis:
    """The embedded Redis, for the supervisor. It has a log of its own, beside its data."""

    name = "redis"

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    async def start(self) -> None:
        await asyncio.to_thread(self._server.start)
        log.info("redis answers; its data and its log are in %s", self._server.folder)

    async def ready(self) -> None:
        return

    async def wait(self) -> int:
        return await asyncio.to_thread(self._server.wait)

    def send(self, number: int) -> None:
        if self._server.alive and self._server.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._server.pid, number)

    def last_words(self) -> str:
        return f"see {self._server.folder / 'redis.log'}"
