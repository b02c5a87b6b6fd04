"""`openworld train`: the worker process, which learns submitted tasks."""

from __future__ import annotations

import argparse
import atexit
import logging
import os
import signal
import socket
import sys
from types import FrameType
from typing import Any, NoReturn

from models.errors import OpenWorldError
from models.storage import Storage
from models.versions.folder_id import folder_id
from openworld import logs
from openworld.commands import learn, require_packages
from openworld.environment import settings_from
from trainer.data_folder import check_folder_settings, keep_of
from trainer.learning.settings import LearnerSettings
from trainer.worker.settings import WorkerSettings

log = logging.getLogger(__name__)

SUMMARY = "learn submitted tasks one after the other, and publish versions"
EPILOG = """\
examples:
  OPENWORLD_REDIS_URL=redis://127.0.0.1:6379 openworld train --data robot
  OPENWORLD_TRAIN_PROCESSES=2 openworld train --data robot
  torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint 10.0.0.5:29400 --rdzv-backend c10d -m openworld train

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
    check_folder_settings(storage, learner)  # a wrong setting ends the program, not a task
    # Before the import of torch, which uses all cores for seconds, and reads the policy: threads that wait actively for
    # each other take a server's cores, and beside one other busy process refining takes 1.7 times as long.
    os.nice(settings.nice)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    if int(os.environ.get("RANK", "0")):
        return _help(storage, learner)
    id = folder_id(storage)
    # Imported here: other commands need no torch.
    from prometheus_client import start_http_server

    from tasks.queue import TaskQueue, announce, check_redis, connect, key_prefix
    from trainer.helpers import start_helpers
    from trainer.worker.metrics import WorkerMetrics
    from trainer.worker.worker import Worker

    check_redis(settings.redis_url.get_secret_value(), settings.confirming_replicas)
    client, prefix = connect(settings.redis_url.get_secret_value()), key_prefix(id)
    metrics = WorkerMetrics(settings.stall_seconds)
    storage.observe(metrics.store.observe)
    if settings.metrics_port:
        try:
            start_http_server(settings.metrics_port, settings.metrics_host, metrics.registry)
        except OSError as error:
            raise OpenWorldError(
                f"the trainer's metrics cannot be served on port {settings.metrics_port} ({error.strerror}): "
                "choose another with OPENWORLD_TRAIN_METRICS_PORT, or none with 0"
            ) from error
    keep_of(storage, learner)  # recorded once nothing else can be wrong
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
    start_helpers(storage.root, learner)
    worker.run()
    return _end_process()


def _end_process() -> NoReturn:
    """End at once: the interpreter would free what torch and its exporter have made, one object after another."""
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


def _help(storage: Storage, learner: LearnerSettings) -> int:
    """Be a helper of the trainer, which `torchrun` has started with rank 0."""
    from trainer.helpers.helper import open_passes_of
    from trainer.helpers.helper import run as run_helper
    from trainer.learning.reproducibility import configure_torch

    configure_torch(learner)
    run_helper(open_passes_of(storage, learner))
    return 0
