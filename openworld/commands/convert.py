"""`openworld convert`: keep less of the images that a data folder was taught."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from models.errors import OpenWorldError
from models.storage import Storage
from models.versions.folder_id import recorded_id
from models.versions.keep import MODES
from openworld.commands import learn, require_data, require_packages
from openworld.environment import settings_from
from openworld.progress import count_done
from openworld.tables import count
from tasks.settings import ProgramSettings
from trainer.learning.settings import LearnerSettings

if TYPE_CHECKING:
    from tasks.queue import TaskQueue

SUMMARY = "keep less of the images that a data folder was taught: features in place of images, or statistics only"
EPILOG = """\
examples:
  openworld convert --keep features --data robot
  openworld convert --keep statistics --data robot

Stop the service first. To keep features, those of all images that versions need are stored, then the images are
discarded, also those of ended tasks in the inbox. To keep statistics, images and features are discarded; the method of
the folder must be hat-csi or sup-csi. Two earlier versions may differ by a single image, and so reveal its features:
their contents, and those of rejected results, are removed, and it is not possible to roll back to them.

This cannot be undone. Images of tasks that have not ended stay until these end. After an interruption, run the same
command again. Copies elsewhere, such as backups, are yours to remove.

What each mode keeps is in docs/privacy.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keep", required=True, choices=MODES, help="what to keep from now on")
    parser.add_argument(
        "--redis-url", metavar="URL", help="redis://host:port or unix:///path (default: OPENWORLD_REDIS_URL)"
    )


def run(arguments: argparse.Namespace) -> int:
    require_packages("all", *learn.REQUIRED_PACKAGES, "redis")
    given: dict[str, Any] = {"data": arguments.data, "redis_url": arguments.redis_url}
    settings, learner = settings_from(ProgramSettings, given), settings_from(LearnerSettings, {})
    require_data(settings)
    # Imported here: other commands need neither torch nor the inbox.
    from service.audit import AuditLog
    from service.inbox import Inbox, InboxInUse
    from tasks.images import NOVELTIES, ImageStore
    from trainer.conversion import convert

    storage = settings.open_storage()
    try:
        inbox = closing(Inbox(storage.root))
    except InboxInUse as error:
        raise OpenWorldError(f"a server runs on {settings.data}: stop it, then convert the folder") from error
    with inbox as novelties, count_done("images") as done, _unfinished_images(settings, storage) as unfinished:
        # The mode of the settings is what the folder is to become, or nothing.
        converted = convert(storage, arguments.keep, learner.model_copy(update={"keep": None}), unfinished, done)
        novelties.delete(converted.discarded)
        ImageStore(storage, NOVELTIES).remove(*converted.discarded)
    AuditLog(settings.data).record_command("folder.convert", arguments.keep, images=len(converted.discarded))
    print(
        f"{storage.location('')} keeps {arguments.keep}"
        + (f": features of {count(converted.features, 'image')}" if arguments.keep == "features" else "")
        + f"; {count(len(converted.discarded), 'image')} discarded"
    )
    if converted.versions:
        names = ", ".join(map(str, converted.versions))
        what = f"{count(converted.contents, 'content')} of earlier versions and rejected results removed"
        print(f"{what}; it is not possible any more to roll back to version {names}")
    if converted.unfinished:
        print(f"{count(converted.unfinished, 'image')} of unfinished tasks stay until these tasks end")
    return 0


@contextmanager
def _unfinished_images(settings: ProgramSettings, storage: Storage) -> Iterator[set[str]]:
    """The images of tasks that have not ended; the folder's own Redis server is started for that."""
    from openworld.queues import queue_of, running_queue

    with running_queue(settings, storage) as queue:
        if queue is not None and settings.redis_url is None:
            raise OpenWorldError(f"`openworld up` runs on {settings.data}: stop it, then convert the folder")
        if queue is not None:
            yield _unfinished(queue, storage)
            return
    if recorded_id(storage) is None:  # no program has used a queue
        yield set()
        return
    if not (storage.root / "redis").is_dir():
        raise OpenWorldError(
            f"{storage.location('')} was used with a task queue, and images of its tasks must stay until these end: "
            "set OPENWORLD_REDIS_URL to the Redis server of its programs, or use --redis-url"
        )
    with queue_of(settings, storage) as queue:
        unfinished = _unfinished(queue, storage)
    yield unfinished


def _unfinished(queue: TaskQueue, storage: Storage) -> set[str]:
    from tasks.discarding import other_queues

    if others := other_queues(storage, queue):
        raise OpenWorldError(
            f"images of {storage.location('')} were also submitted through another Redis server, whose tasks may need "
            f"them: set OPENWORLD_REDIS_URL to that one, or delete {', '.join(others)} if its tasks are of no use"
        )
    return {key for images in queue.unfinished_images().values() for key in images}
