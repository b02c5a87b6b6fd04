"""Rank 0: starts the helpers, or finds those that `torchrun` has started, and shares the work of a training with them.

**A helper that dies, or does not answer for `ANSWER_SECONDS`, fails the attempt, never more than that.** Each training
has a process group of its own, so nothing that a failed one left unread reaches the next.
"""

import atexit
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore, rendezvous  # type: ignore[attr-defined]

from models.errors import OpenWorldError
from trainer.helpers import started_by_torchrun
from trainer.helpers.helper import END, GO, READY, TRAINING, Plan, join_group, leave_group
from trainer.helpers.messages import Message, receive, send
from trainer.learning.processes import Job, Tensors

log = logging.getLogger(__name__)
T = TypeVar("T")
R = TypeVar("R")

READY_SECONDS = 120.0  # for helpers to start and to open the backbone
ANSWER_SECONDS = 300.0  # for one chunk of images, or one shard of a gradient
LOOK_SECONDS = 0.05
COMMAND = (sys.executable, "-m", "trainer.helpers.helper")


class HelperLost(OpenWorldError):
    """A helper did not start, has died, does not answer, or cannot compute its part. The attempt can be repeated."""


class Helpers:
    """The other processes of this trainer."""

    def __init__(
        self, count: int, environment: Mapping[str, str] | None = None, command: Sequence[str] = COMMAND
    ) -> None:
        """`count` processes with this one. `torchrun` has started them if it has started this process."""
        self.children: dict[int, subprocess.Popen[bytes]] = {}  # by rank
        self._training = 0
        self._command, self.environment = command, dict(os.environ if environment is None else environment)
        if started_by_torchrun():
            self._store, _, self.count = next(rendezvous("env://"))
        else:
            self.count = count
            self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.environment |= {
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self._store.port),
            }
            self._start_missing()
        atexit.register(self.close)

    @contextmanager
    def training(self, plan: Plan, device: str) -> Iterator["Training"]:
        """The processes of one training, which has a backbone, graphs and a seed. HelperLost if they do not come."""
        self._training += 1
        self._start_missing()
        self._store.set(TRAINING, json.dumps({**plan, "number": self._training}))
        training = Training(self.count)
        try:
            self._wait_until_ready()
            self._store.set(f"{GO} {self._training}", "")
            with _translated("a helper does not join"):
                join_group(self._store, self._training, device, 0, self.count, ANSWER_SECONDS)
            yield training
            training.end()
        except HelperLost:
            self._kill()
            raise
        finally:
            leave_group()

    def close(self) -> None:
        """End the helpers."""
        atexit.unregister(self.close)
        with suppress(dist.DistError):
            self._store.set(TRAINING, END)
        for child in self.children.values():
            with suppress(subprocess.TimeoutExpired):
                child.wait(2.0)
        self._kill()

    def _start_missing(self) -> None:
        if started_by_torchrun():
            return
        alive = {rank: child for rank, child in self.children.items() if child.poll() is None}
        self.children = {rank: alive.get(rank) or self._start(rank) for rank in range(1, self.count)}

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        environment = self.environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL, env=environment)

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_SECONDS
        for rank in range(1, self.count):
            key = f"{READY} {self._training} {rank}"
            while not self._store.check([key]):
                child = self.children.get(rank)
                if child is not None and child.poll() is not None:
                    raise HelperLost(f"helper {rank} ended with code {child.returncode}: see its log above")
                if time.monotonic() > end:
                    raise HelperLost(f"helper {rank} is not ready after {READY_SECONDS:g} s: check that it runs")
                time.sleep(LOOK_SECONDS)
            if problem := self._store.get(key).decode():
                raise HelperLost(f"helper {rank} cannot start: {problem}")

    def _kill(self) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()


class Training:
    """The processes of one training, this one included."""

    def __init__(self, count: int) -> None:
        self.count = count

    def map(
        self,
        work: Iterable[T],
        compute: Callable[[T], R],
        job_of: Callable[[T], Job],
        result_of: Callable[[Tensors], R],
    ) -> Iterator[R]:
        """In rounds of one part per process. A round is made before any of it is sent: making it may need a round."""
        parts = iter(work)
        while own := list(islice(parts, self.count)):
            jobs = [job_of(part) for part in own[1:]]
            for rank, job in enumerate(jobs, start=1):
                with _translated(f"helper {rank} has died or does not answer"):
                    send(Message({**job.values, "kind": job.kind}, job.tensors), rank)
            results = [compute(own[0])]
            for rank in range(1, len(own)):
                with _translated(f"helper {rank} has died or does not answer"):
                    answer = receive(rank)
                if problem := answer.values.get("problem"):
                    raise HelperLost(f"helper {rank}: {problem}")
                results.append(result_of(answer.tensors))
            yield from results

    def end(self) -> None:
        for rank in range(1, self.count):
            with suppress(RuntimeError):
                send(Message({"kind": END}, {}), rank)


@lru_cache(maxsize=1)
def helpers_of(data: Path, device: str, threads: int, processes: int) -> Helpers:
    """Those of this process, started once, with its settings."""
    settings = {
        "OPENWORLD_DATA": str(data),
        "OPENWORLD_DEVICE": device,
        "OPENWORLD_TRAIN_THREADS": str(threads),
    }
    return Helpers(processes, os.environ | settings)


@contextmanager
def _translated(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise HelperLost(f"{what}: {str(error).partition(chr(10))[0]}") from error
