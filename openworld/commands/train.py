"""`openworld train`: the worker that learns what people submit."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from types import FrameType
from typing import Any

from models.errors import OpenWorldError
from models.versions.data_format import open_data_folder
from openworld import logs
from openworld.options import settings_from
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

SUMMARY = "learn submitted tasks, one after the other, and publish versions"
EPILOG = """\
examples:
  OPENWORLD_REDIS_URL=redis://127.0.0.1:6379 openworld train --data robot

Ctrl-C or SIGTERM: the task at hand goes back to the queue at the end of its epoch, and whoever takes it next goes on
from there. A second one: at once. Metrics are on OPENWORLD_TRAIN_METRICS_PORT (8001).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-url", metavar="URL", help="redis://host:port or unix:///path (OPENWORLD_REDIS_URL)")


def run(arguments: argparse.Namespace) -> int:
    given: dict[str, Any] = {"data": arguments.data, "redis_url": arguments.redis_url}
    settings, learner = settings_from(WorkerSettings, given), settings_from(LearnerSettings, {})
    if settings.redis_url is None:
        raise OpenWorldError("where is the queue? Set OPENWORLD_REDIS_URL, or start everything with: openworld up")
    logs.set_up(settings.log_level, settings.log_format)
    open_data_folder(settings.data)
    os.nice(settings.nice)  # before torch, whose loading alone takes the cores for seconds
    # Here and not above: the other commands do not need it.
    from prometheus_client import start_http_server

    from tasks.queue import TaskQueue, announce, connect
    from trainer.worker.metrics import WorkerMetrics
    from trainer.worker.worker import Worker

    client = connect(settings.redis_url.get_secret_value())
    metrics = WorkerMetrics()
    if settings.metrics_port:
        try:
            start_http_server(settings.metrics_port, settings.metrics_host, metrics.registry)
        except OSError as error:
            raise OpenWorldError(
                f"the trainer's metrics cannot be on port {settings.metrics_port} ({error.strerror}): "
                "choose another with OPENWORLD_TRAIN_METRICS_PORT, or none with 0"
            ) from error
    queue = TaskQueue(client, lease_seconds=settings.lease_seconds, max_attempts=settings.max_attempts)
    name = f"{socket.gethostname()}-{os.getpid()}"
    worker = Worker(arguments.data, queue, learner, name, metrics, lambda version: announce(client, version))

    def stop(number: int, frame: FrameType | None) -> None:
        logging.getLogger(__name__).info("stopping at the end of the epoch; once more to stop at once")
        worker.stop()
        for one in (signal.SIGTERM, signal.SIGINT):
            signal.signal(one, signal.SIG_DFL)

    for one in (signal.SIGTERM, signal.SIGINT):
        signal.signal(one, stop)
    worker.run()
    return 0
