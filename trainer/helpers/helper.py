"""A helper: waits for a training of rank 0, computes what it is sent, and ends with rank 0.

`python -m trainer.helpers.helper` is one, with the variables of `torchrun` (`RANK`, `WORLD_SIZE`, `MASTER_ADDR`,
`MASTER_PORT`) in its environment.
"""

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, rendezvous  # type: ignore[attr-defined]

from models.errors import BackboneError, OpenWorldError
from models.network.adapted_blocks import TaskTensors
from models.storage import Storage
from models.versions.store import VersionStore
from tasks.settings import ProgramSettings
from trainer.context import backbone_of, runtime_of
from trainer.helpers.messages import Message, receive, send
from trainer.learning.forward_passes import ForwardPasses
from trainer.learning.methods.hat import masks_of, tensors_of
from trainer.learning.methods.replay import head_loss
from trainer.learning.methods.shards import gradient
from trainer.learning.processes import Job, Tensors
from trainer.learning.reproducibility import configure_torch, select_device
from trainer.learning.settings import LearnerSettings

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1  # between looks for a training
ORDER_SECONDS = 3600.0  # between two messages of rank 0, which computes alone for a part of a training
TRAINING, READY, GO = "training", "ready", "go"  # keys of the rendezvous store
END = "end"  # in place of a training: rank 0 ends

Plan = dict[str, Any]  # of a training: number, backbone, graphs, seed
Open = Callable[[Plan], ForwardPasses]


class UnknownJob(OpenWorldError):
    """Rank 0 has sent a job that this release cannot compute."""


def run(open_passes: Open) -> None:
    """Help rank 0 until it ends. A signal to stop counts between trainings: rank 0 decides how a training ends."""
    stopping = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopping.set()

    for handled in (signal.SIGTERM, signal.SIGINT):
        signal.signal(handled, stop)
    store, rank, count = next(rendezvous("env://"))
    latest = b""
    while not stopping.is_set():
        try:
            order = store.get(TRAINING) if store.check([TRAINING]) else b""
            if order == END.encode():
                return
            if order != latest:
                latest = order
                _help(order, open_passes, store, rank, count)
        except dist.DistError as error:
            log.info("process %d ends, because rank 0 has ended: %s", rank, str(error).partition("\n")[0])
            return
        time.sleep(LOOK_SECONDS)


def _help(order: bytes, open_passes: Open, store: Store, rank: int, count: int) -> None:
    """One training."""
    plan: Plan = json.loads(order)
    number, problem = plan["number"], ""
    try:
        passes = open_passes(plan)
    except Exception as error:
        problem = f"{type(error).__name__}: {error}"
    store.set(f"{READY} {number} {rank}", problem)
    if problem:
        log.error("process %d cannot help: %s", rank, problem)
        return
    while not store.check([f"{GO} {number}"]):  # all others are ready, or rank 0 has given up
        if store.get(TRAINING) != order:
            return
        time.sleep(LOOK_SECONDS)
    try:
        join_group(store, number, passes.device.type, rank, count, ORDER_SECONDS)
        while (message := receive(0)).values["kind"] != END:
            send(_answer(passes, Job(message.values["kind"], message.values, message.tensors)), 0)
    except RuntimeError as error:  # rank 0 has ended the training, or has ended
        log.info("process %d leaves training %d: %s", rank, number, str(error).partition("\n")[0])
    finally:
        leave_group()


def _answer(passes: ForwardPasses, job: Job) -> Message:
    try:
        return Message({}, compute(passes, job))
    except Exception as error:
        log.exception("a helper cannot compute %s", job.kind)
        return Message({"problem": f"{type(error).__name__}: {error}"}, {})


def compute(passes: ForwardPasses, job: Job) -> Tensors:
    """The answer to a job of `trainer.learning`."""
    tensors, values = job.tensors, job.values
    if job.kind == "tokens":
        items = [(str(key), int(view)) for key, view in values["items"]]
        images = {key: tensors[str(place)].numpy().tobytes() for place, (key, _) in enumerate(items)}
        return {"tokens": passes.tokens(items, images.__getitem__)}
    if job.kind == "frozen features":
        return {"features": torch.from_numpy(passes.frozen_features(tensors["tokens"]))}
    if job.kind == "task features":
        task = TaskTensors(*(tensors[name] for name in TaskTensors._fields))
        return {"features": torch.from_numpy(passes.task_features(tensors["tokens"], task))}
    if job.kind == "gradient":
        return _gradient(passes, {**tensors}, values)
    raise UnknownJob(f"unknown kind of job {job.kind!r}: run all processes of a training with the same release")


def _gradient(passes: ForwardPasses, parameters: Tensors, values: Mapping[str, Any]) -> Tensors:
    tokens, labels = parameters.pop("tokens"), parameters.pop("labels")
    for parameter in parameters.values():
        parameter.requires_grad_()
    masks = masks_of(parameters, values["s"])
    z = passes.backbone.blocks(tokens, tensors_of(parameters), masks)
    found = gradient(parameters, values["share"] * head_loss(z, labels, parameters))
    return {"loss": torch.tensor(found.loss, dtype=torch.float64), **found.by_name}


def join_group(store: Store, training: int, device: str, rank: int, count: int, seconds: float) -> None:
    """Join the process group of a training, whose messages may take so many seconds."""
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        store=PrefixStore(f"group {training}", store),
        rank=rank,
        world_size=count,
        timeout=timedelta(seconds=seconds),
    )


def leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def open_passes_of(storage: Storage, settings: LearnerSettings) -> Open:
    """The passes of the backbone of a data folder, opened once."""

    @lru_cache(maxsize=1)
    def opened(sha256: str, graphs: tuple[tuple[str, str], ...], seed: int) -> ForwardPasses:
        store = VersionStore(storage)
        backbone = backbone_of(store, settings, None)
        if backbone.spec.sha256 != sha256:
            raise BackboneError(f"{storage.location('')} has the backbone {backbone.spec.sha256}, rank 0 has {sha256}")
        device = select_device(settings)
        runtime = runtime_of(store, dict(graphs), settings) if device == "cpu" else None
        return ForwardPasses(backbone, seed, device, runtime)

    return lambda plan: opened(plan["backbone"], tuple(sorted(plan["graphs"].items())), plan["seed"])


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    settings = LearnerSettings()
    configure_torch(settings)
    run(open_passes_of(ProgramSettings().open_storage(test=False), settings))
    return 0


if __name__ == "__main__":
    sys.exit(main())
