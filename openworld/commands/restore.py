"""`openworld restore`: write a backup to a new data folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from models import files
from models.errors import OpenWorldError
from openworld.commands import require_packages
from openworld.environment import settings_from
from tasks.settings import ProgramSettings

SUMMARY = "write a backup to a new data folder, with its tasks"
EPILOG = """\
examples:
  openworld restore backups/2026-01-31 --data robot-2
  openworld restore backups/2026-01-31 --data robot-2 --erasures robot

Every file is verified. The data folder must not exist, or be empty; other services may run meanwhile. Tasks go into
OPENWORLD_REDIS_URL, or into the data folder, where `openworld up` finds them; those that had not ended wait again. The
rows of an inbox that servers share go there as well.

--erasures names the data folder, or its erasures.jsonl, of the service that the backup is from: images that were erased
since the backup was made are not restored.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backup", type=Path, metavar="BACKUP", help="a folder that `openworld backup` wrote")
    parser.add_argument("--erasures", type=Path, metavar="PATH", help="do not restore images that were erased since")
    parser.add_argument(
        "--redis-url", metavar="URL", help="redis://host:port or unix:///path (default: OPENWORLD_REDIS_URL)"
    )


def run(arguments: argparse.Namespace) -> int:
    require_packages("serve", "numpy", "safetensors", "redis")
    settings = settings_from(ProgramSettings, {"data": arguments.data, "redis_url": arguments.redis_url})
    if settings.store:
        raise OpenWorldError(
            "a backup is restored to a folder: unset OPENWORLD_STORE, and move the folder to the object store with "
            "`openworld migrate`"
        )
    root = settings.data
    if root.exists() and any(root.iterdir()):
        raise OpenWorldError(f"{settings.data} is not empty: give the name of a new folder with --data")
    # Imported here: the parser of the other commands needs none of it.
    from openworld.backup import restore_data, restored_inbox, restored_queue
    from openworld.queues import queue_of
    from service.shared import restore_inbox
    from tasks.images import erased_images

    erasures: Path | None = arguments.erasures
    if erasures is not None and not erasures.exists():
        raise OpenWorldError(f"--erasures {erasures} does not exist")
    log = None if erasures is None else erasures if erasures.is_dir() else erasures.parent
    erased = set() if log is None else erased_images(log)
    erased_features = set() if log is None else erased_images(log, with_features=True)
    files.make_folder(root.parent)
    # A volume is an empty folder that cannot be replaced: its content is moved into it, `CURRENT` last.
    temporary = files.temporary_beside(root / "restored" if root.exists() else root)
    try:
        temporary.mkdir()
        restore_data(arguments.backup, temporary, erased, erased_features)
        document, tasks = restored_queue(arguments.backup) or {"tasks": []}, 0
        rows, seconds = restored_inbox(arguments.backup, temporary)
        if document["tasks"] or rows:
            with queue_of(settings, temporary) as queue:
                tasks = queue.restore(document) if document["tasks"] else 0
                restore_inbox(queue.client, queue.prefix, rows, seconds)
        if root.exists():
            for path in sorted(temporary.iterdir(), key=lambda path: path.name == "CURRENT"):
                path.rename(root / path.name)
            temporary.rmdir()
            files.fsync_folder(root)
        else:
            temporary.rename(root)
        files.fsync_folder(root.parent)
    except BaseException:
        files.remove(temporary)
        raise
    print(f"{settings.data}: restored {arguments.backup}, with {tasks} tasks. Examine it with `openworld check`")
    return 0
