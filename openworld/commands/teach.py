"""`openworld teach`: submit a folder of labelled images to a running service, and follow the task."""

from __future__ import annotations

import argparse
import json
import sys
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from openworld import remote, tables
from openworld.progress import Display
from service.wire.advice import Advice
from tasks.batch import open_batch
from trainer.learning.progress import Event

if TYPE_CHECKING:
    from service.client import Client, TaskAnswer

SUMMARY = "submit a folder of labelled images to a running service, and follow the task"
EPILOG = """\
examples:
  openworld teach animals/                       animals/cat/1.jpg, animals/dog/2.jpg, ...: one sub-folder per class
  openworld teach animals.zip --no-wait
  OPENWORLD_KEY=... openworld teach animals/ --url https://robots.example:8000

Ctrl-C stops this command, not the task. Exit code 3: the gate rejected the new version.
"""
POLL_SECONDS = 0.5
SWAP_SECONDS = 60.0  # for the service to activate the new version
EXIT_CODES = {"published": 0, "rejected": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images", type=Path, metavar="FOLDER|ZIP", help="a folder with one sub-folder per class, or a zip of it"
    )
    remote.add_arguments(parser)
    parser.add_argument("--no-wait", action="store_true", help="submit, print the task's id, and exit")
    parser.add_argument("--json", action="store_true", help="print the task as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    address = remote.service_url(arguments.url).rstrip("/")
    with remote.connect(address) as client:
        known = [entry.name for entry in client.classes().classes if entry.state == "active"]
        # The service checks the batch as well; a bad one is refused here before the upload.
        with open_batch(arguments.images, known) as batch:
            origins = {image.sha256: image.origin for image in batch.images}
            with zipped((image.label, batch.read(image.sha256)) for image in batch.images) as file:
                task = client.teach_zip(file)
        if not task.fresh:
            print(f"this batch was submitted before: it is task {task.id}", file=sys.stderr)
        for warning in task.warnings:
            print(f"warning: {warning}", file=sys.stderr)
        if not arguments.no_wait:
            images = f"{tables.count(len(batch.images), 'image')} of {', '.join(batch.classes)}"
            task = follow(client, task, f"{images}, for {address}")
    if arguments.json:
        print(json.dumps(task.model_dump(mode="json"), ensure_ascii=False))
    elif arguments.no_wait:
        print(f"task {task.id} is {task.state}")
    else:
        if task.result:
            tables.console().print(tables.task_table(task.result["tasks"]))
            reported = sum(len(report["classes"]) for report in task.result["tasks"])
            # Earlier releases did not record the number of classes.
            tables.console().print(f"estimate {tables.estimate(task.result, task.result.get('classes', reported))}")
            tables.print_advice(Advice.model_validate(task.result.get("advice") or {}), origins)
        if task.state == "published" and task.reason:
            print(f"version {task.version} answers with them provisionally, because learning failed: {task.reason}")
        elif task.state == "published":
            print(f"version {task.version} is active: {address}/#/versions/{task.version}")
        else:
            print(f"{task.state}: {task.reason}", file=sys.stderr)
    return 0 if arguments.no_wait else EXIT_CODES.get(task.state, 2)


def follow(
    client: Client, task: TaskAnswer, what: str, on_provisional: Callable[[int], None] | None = None
) -> TaskAnswer:
    """Show the progress of a task until it ends and, if it is published, until its version is active.

    `on_provisional` is called once with the version that answers with its classes before it is learned, when it does.
    """
    with Display() as display:
        display.say(f"{what}: waiting for the trainer")
        told = False
        while task.state in ("queued", "learning", "evaluating"):
            time.sleep(POLL_SECONDS)
            task = client.task(task.id)
            if task.provisional is not None and not told and client.versions().serving >= task.provisional:
                told = True
                display.note(f"version {task.provisional} answers with {', '.join(task.counts)} already")
                if on_provisional is not None:
                    on_provisional(task.provisional)
            if task.progress is not None:
                fields = task.progress.model_dump(exclude={"losses"})
                display(Event(task=task.id, **fields))
        end = time.monotonic() + SWAP_SECONDS
        while task.version is not None and client.versions().serving < task.version and time.monotonic() < end:
            time.sleep(0.1)
    return task


@contextmanager
def zipped(images: Iterable[tuple[str, bytes]]) -> Iterator[Path]:
    """A temporary zip with one folder per class, from (label, image) pairs: a batch may be larger than the memory."""
    with NamedTemporaryFile(suffix=".zip") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # images do not compress
            for number, (label, data) in enumerate(images):
                archive.writestr(f"{label}/{number}", data)
        file.flush()
        yield Path(file.name)
