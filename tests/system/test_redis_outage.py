"""A Redis server that hangs: predictions, probes, metrics, swaps and training go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2 as httpx

from models.versions.store import VersionStore
from tests.support.learning_loop import batch, loop
from tests.support.redis_servers import RedisServer
from tests.support.servers import known_image, wait_until

WAITING = 100  # requests that need Redis: more than there are threads
SECONDS = 30.0  # for every other request
HANGING_SECONDS = 300.0  # for a reply of Redis: longer than all other requests together


@contextmanager
def hanging(redis: RedisServer) -> Iterator[None]:
    """Connections are accepted by the kernel, but nothing answers."""
    assert redis.pid is not None
    os.kill(redis.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(redis.pid, signal.SIGCONT)


def test_a_server_answers_all_that_needs_no_redis(tmp_path: Path) -> None:
    with loop(tmp_path) as running:
        running.settings["REDIS_SECONDS"] = str(HANGING_SECONDS)
        running.start("serve")
        limits = httpx.Limits(max_connections=2 * WAITING)
        with (
            ThreadPoolExecutor(WAITING) as clients,
            httpx.Client(base_url=running.url, timeout=SECONDS, limits=limits) as http,
        ):
            with hanging(running.redis):
                waiting = [clients.submit(http.get, "/tasks", timeout=HANGING_SECONDS) for _ in range(WAITING)]
                # Calls beyond the limit are refused at once; the others wait for Redis.
                wait_until(lambda: sum(one.done() for one in waiting) >= WAITING - 64, 60)
                assert http.post("/predict", content=known_image("class 0")).status_code == 200
                assert http.post("/predict?version=2", content=known_image("class 0")).status_code == 200
                assert http.post("/explain", content=known_image("class 0")).status_code == 200
                assert http.get("/readyz").status_code == 200
                assert http.get("/metrics").status_code == 200
                assert http.get("/versions").status_code == 200
                assert http.post("/versions/2/activate").json()["serving"] == 2
                VersionStore(running.data).activate(3, "operator", "another process")
                wait_until(lambda: http.get("/readyz").json()["version"] == 3, 60)
                assert not all(one.done() for one in waiting)
            assert {one.result().status_code for one in waiting} == {200, 503}
            wait_until(lambda: http.get("/tasks").status_code == 200)


def test_training_goes_on_and_the_task_ends_when_redis_answers_again(tmp_path: Path) -> None:
    with loop(tmp_path) as running:
        running.start("serve")
        running.start("train")
        with ExitStack() as outage:
            with running.holding_trainers():
                id = running.submit(batch("fresh", "fresh too")).json()["id"]
                running.wait_for_progress(id)
                outage.enter_context(hanging(running.redis))
            # A call of a hanging Redis takes 20 seconds, and there are more events than could wait for one each.
            wait_until(lambda: VersionStore(running.data).current() == 4, 60)
        running.check_learned_once(id)
        assert running.task(id)["attempts"] == 1
