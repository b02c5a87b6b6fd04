"""Teach the service the classes of a folder, and wait until it answers with them.

    python examples/teach_folder.py fruit/          fruit/apple/1.jpg, fruit/pear/2.jpg, ...: one sub-folder per class

The same folder is the same task: a second run returns the first run's task instead of learning again. Exit code 1 says
that the task did not become a version. `openworld teach` does the same with a progress display.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zipfile
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO

from service.client import ApiError, Client

ENDINGS = {".jpg", ".jpeg", ".png", ".webp"}
UNFINISHED = ("queued", "learning", "evaluating")


def zip_folder(folder: Path, file: IO[bytes]) -> None:
    """Write the images of a folder as the zip that POST /tasks takes; not compressed, because images already are."""
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(folder.glob("*/*")):
            if path.suffix.lower() in ENDINGS:
                archive.write(path, path.relative_to(folder))
    file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description="Teach the classes of a folder.")
    parser.add_argument("folder", type=Path, help="one sub-folder per class")
    parser.add_argument("--url", default=os.environ.get("OPENWORLD_URL", "http://127.0.0.1:8000"))
    arguments = parser.parse_args()
    with Client(arguments.url, os.environ.get("OPENWORLD_KEY")) as client:
        try:
            with NamedTemporaryFile(suffix=".zip") as file:
                zip_folder(arguments.folder, file)
                task = client.teach_zip(Path(file.name))
        except ApiError as error:
            sys.exit("\n".join([f"the batch was refused: {error}", *error.problems]))
        images = sum(task.counts.values())
        print(f"task {task.id}: {images} images of {', '.join(sorted(task.counts))}", flush=True)
        while task.state in UNFINISHED:
            time.sleep(0.5)
            task = client.task(task.id)
        if task.version is None:
            sys.exit(f"task {task.id} is {task.state}: {task.reason}")
        while client.versions().serving < task.version:
            time.sleep(0.1)
    print(f"version {task.version} answers")


if __name__ == "__main__":
    main()
