"""The queue of a data folder, for commands that work beside a running service."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from time import monotonic, sleep

from models.storage import DataFolder, Storage, storage_of
from models.versions.folder_id import folder_id, recorded_id
from openworld.up.embedded_redis import find_binary, redis_answers, redis_command, redis_url, socket_path
from tasks.errors import QueueUnavailable
from tasks.queue import TaskQueue, connect, key_prefix
from tasks.settings import ProgramSettings

START_SECONDS = 30.0  # for a Redis server to read its data


@contextmanager
def running_queue(settings: ProgramSettings, storage: Storage | None = None) -> Iterator[TaskQueue | None]:
    """The queue of OPENWORLD_REDIS_URL, else of the Redis server that `openworld up` has started; None without both.

    None also if no server or trainer has used a queue with the data folder.
    """
    id = recorded_id(storage or settings.data)
    socket = settings.data / "redis" / "redis.sock"
    if id is None:
        yield None
        return
    if settings.redis_url is not None:
        url = settings.redis_url.get_secret_value()
    elif redis_answers(socket):
        url = redis_url(socket)
    else:
        yield None
        return
    with closing(connect(url)) as client:
        yield TaskQueue(client, key_prefix(id))


@contextmanager
def queue_of(settings: ProgramSettings, data: DataFolder) -> Iterator[TaskQueue]:
    """The queue of a data folder in OPENWORLD_REDIS_URL, else in the folder, as `openworld up` has it.

    The Redis server of the folder runs meanwhile.
    """
    prefix, folder = key_prefix(folder_id(data)), storage_of(data).root / "redis"
    if settings.redis_url is not None:
        with closing(connect(settings.redis_url.get_secret_value())) as client:
            yield TaskQueue(client, prefix)
        return
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with socket_path(folder) as path:
        process = subprocess.Popen(redis_command(find_binary(), folder, path), stdout=subprocess.DEVNULL)
        try:
            deadline = monotonic() + START_SECONDS
            while not redis_answers(path):
                if process.poll() is not None or monotonic() > deadline:
                    raise QueueUnavailable(
                        f"the Redis server of {folder} does not start: check the rights and the space of the folder"
                    )
                sleep(0.02)
            with closing(connect(redis_url(path))) as client:
                yield TaskQueue(client, prefix)
        finally:
            process.terminate()
            process.wait(START_SECONDS)
            path.unlink(missing_ok=True)
