"""`openworld teach`: hand a folder of named images to a running service, and watch it learn."""

from __future__ import annotations

import argparse
import io
import json
import sys
import time
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from openworld import remote, tables
from openworld.progress import Display
from tasks.batch import open_batch
from trainer.learning.progress import Event

if TYPE_CHECKING:
    from service.client import Client, TaskAnswer

SUMMARY = "hand a folder of named images to a running service, and watch it learn"
EPILOG = """\
examples:
  openworld teach animals/                       animals/cat/1.jpg, animals/dog/2.jpg, ...: a sub-folder a class
  openworld teach animals.zip --no-wait
  OPENWORLD_KEY=... openworld teach animals/ --url https://robots.example:8000

Ctrl-C stops the watching, not the learning. Exit code 3: the new version was rejected by the gate.
"""
LOOKS = 0.5
SWAP_SECONDS = 60.0  # for the service to begin answering with what it has learned
EXIT = {"published": 0, "rejected": 3}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images", type=Path, metavar="FOLDER|ZIP", help="a folder with a sub-folder a class, or a zip of it"
    )
    remote.add_arguments(parser)
    parser.add_argument("--no-wait", action="store_true", help="hand it in, print the task's id, and leave")
    parser.add_argument("--json", action="store_true", help="print the task as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    with remote.connect(arguments.url) as client:
        known = [entry.name for entry in client.classes().classes if entry.state == "active"]
        # Checked here as well: what is wrong with a folder should not cost an upload.
        with open_batch(arguments.images, known) as batch:
            task = client.teach_zip(zipped((image.label, batch.read(image.sha256)) for image in batch.images))
        if not task.fresh:
            print(f"this batch was handed in before: it is task {task.id}", file=sys.stderr)
        if not arguments.no_wait:
            task = follow(client, task, f"{tables.count(len(batch.images), 'image')} of {', '.join(batch.classes)}")
    if arguments.json:
        print(json.dumps(task.model_dump(mode="json"), ensure_ascii=False))
    elif arguments.no_wait:
        print(f"task {task.id} is {task.state}")
    else:
        _report(task)
    return 0 if arguments.no_wait else EXIT.get(task.state, 2)


def follow(client: Client, task: TaskAnswer, what: str) -> TaskAnswer:
    """Until the task has ended and, when it became a version, until that answers."""
    with Display() as display:
        display.say(f"{what}: waiting for the trainer")
        while task.state in ("queued", "learning", "evaluating"):
            time.sleep(LOOKS)
            task = client.task(task.id)
            if task.progress is not None:
                fields = task.progress.model_dump(exclude={"losses"})
                display(Event(task=task.id, **fields))
        end = time.monotonic() + SWAP_SECONDS
        while task.version is not None and client.versions().serving < task.version and time.monotonic() < end:
            time.sleep(0.1)
    return task


def zipped(images: Iterable[tuple[str, bytes]]) -> bytes:
    """A zip with one folder per class, from (label, image) pairs."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:  # images do not compress
        for number, (label, data) in enumerate(images):
            archive.writestr(f"{label}/{number}", data)
    return file.getvalue()


def _report(task: TaskAnswer) -> None:
    if task.result:
        tables.console().print(tables.task_table(task.result["tasks"]))
    if task.state == "published":
        print(f"version {task.version} answers")
    else:
        print(f"{task.state}: {task.reason}", file=sys.stderr)
