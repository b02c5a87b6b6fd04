"""`openworld train`: the worker process, which learns submitted tasks."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
from types import FrameType
from typing import Any

from models.errors import OpenWorldError
from models.versions.folder_id import folder_id
from openworld import logs
from openworld.commands import learn, require_packages
from openworld.environment import settings_from
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SUMMARY = "learn submitted tasks one after the other, and publish versions"
EPILOG = """\
examples:
  OPENWORLD_REDIS_URL=redis://127.0.0.1:6379 openworld train --data robot

On Ctrl-C or SIGTERM the worker returns its task to the queue at the end of the epoch and exits; the next worker
continues from there. A second signal ends it at once. Metrics are on port OPENWORLD_TRAIN_METRICS_PORT (8001).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--redis-url", metavar="URL", help="redis://host:port or unix:///path (default: OPENWORLD_REDIS_URL)"
    )


def run(arguments: argparse.Namespace) -> int:
    require_packages("train", *learn.REQUIRED_PACKAGES, "redis", "prometheus_client")
    given: dict[str, Any] = {"data": arguments.data, "redis_url": arguments.redis_url}
    settings, learner = settings_from(WorkerSettings, given), settings_from(LearnerSettings, {})
    if settings.redis_url is None:
        raise OpenWorldError("there is no queue: set OPENWORLD_REDIS_URL, or start everything with `openworld up`")
    logs.set_up(settings.log_level, settings.log_format)
    storage = settings.open_storage()
    id = folder_id(storage)
    os.nice(settings.nice)  # before the import of torch, which uses all cores for seconds
    # Imported here: other commands need no torch.
    from prometheus_client import start_http_server

    from tasks.queue import TaskQueue, announce, check_redis, connect, key_prefix
    from trainer.worker.metrics import WorkerMetrics
    from trainer.worker.worker import Worker

    check_redis(settings.redis_url.get_secret_value(), settings.confirming_replicas)
    client, prefix = connect(settings.redis_url.get_secret_value()), key_prefix(id)
    metrics = WorkerMetrics(settings.stall_seconds)
    if settings.metrics_port:
        try:
            start_http_server(settings.metrics_port, settings.metrics_host, metrics.registry)
        except OSError as error:
            raise OpenWorldError(
                f"the trainer's metrics cannot be served on port {settings.metrics_port} ({error.strerror}): "
                "choose another with OPENWORLD_TRAIN_METRICS_PORT, or none with 0"
            ) from error
    queue = TaskQueue(client, prefix, lease_seconds=settings.lease_seconds, max_attempts=settings.max_attempts)
    name = f"{socket.gethostname()}-{os.getpid()}"
    worker = Worker(
        storage,
        queue,
        learner,
        name,
        metrics,
        lambda version: announce(client, version, prefix),
        provisional=settings.provisional == "on",
    )

    def stop(number: int, frame: FrameType | None) -> None:
        log.info("stopping at the end of the epoch; send the signal again to stop at once")
        for handled in (signal.SIGTERM, signal.SIGINT):
            signal.signal(handled, signal.SIG_DFL)
        worker.stop()  # last: it may raise, to leave what cannot be stopped otherwise

    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, stop)
    worker.run()
    return 0
