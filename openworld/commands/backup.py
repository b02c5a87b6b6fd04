"""`openworld backup`: copy a data folder and its queue while the service runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from models.errors import OpenWorldError
from openworld.commands import require_packages
from openworld.environment import settings_from
from tasks.settings import ProgramSettings

SUMMARY = "copy a data folder and its tasks to a new folder, while the service runs"
EPILOG = """\
examples:
  openworld backup backups/2026-01-31 --data robot
  OPENWORLD_REDIS_URL=redis://10.0.0.7:6379 openworld backup /mnt/nas/monday --data robot

The copy is complete or absent, and consistent: every task of the queue finds its images and its version. Checkpoints
are left out, so a task that is being learned starts again after a restoration. Erased images are not in the copy; a
backup that was made before an erasure still has them, see `openworld restore --erasures`.

Exit code: 0 complete, 1 damaged images were left out, 2 no backup was made.
"""

LEFT_OUT = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, metavar="TARGET", help="a folder that does not exist")
    parser.add_argument(
        "--redis-url", metavar="URL", help="redis://host:port or unix:///path (default: OPENWORLD_REDIS_URL)"
    )


def run(arguments: argparse.Namespace) -> int:
    require_packages("serve", "numpy", "safetensors", "redis")
    settings = settings_from(ProgramSettings, {"data": arguments.data, "redis_url": arguments.redis_url})
    if settings.store:
        raise OpenWorldError(
            f"{settings.store} cannot be backed up in this way: copy it to a folder with `openworld migrate "
            f"{settings.store} FOLDER` and back that up with `--data FOLDER` and without OPENWORLD_STORE, or use the "
            "versioning and the replication of the object store, which keep erased and discarded images as well"
        )
    if not settings.data.is_dir():
        raise OpenWorldError(f"there is no data folder {settings.data}: name one with --data")
    # Imported here: the parser of the other commands needs none of it.
    from openworld.backup import create_backup
    from openworld.queues import running_queue

    with running_queue(settings) as queue:
        if queue is None and (settings.data / "redis").exists():
            raise OpenWorldError(
                "the tasks cannot be copied, the Redis server of the folder does not run: start `openworld up`, "
                "or set OPENWORLD_REDIS_URL"
            )
        damaged = create_backup(settings.data, arguments.target, queue)
    for place in damaged:
        print(f"left out, its bytes have changed: {place}")
    without = "" if queue is not None else ", without tasks: there is no queue"
    print(f"{arguments.target}: backup of {settings.data}{without}")
    return LEFT_OUT if damaged else 0
