"""`openworld migrate`: copy a data folder into an object store, or back."""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

from models.errors import OpenWorldError
from models.storage import LocalFiles, Storage, open_storage
from openworld.progress import count_done

SUMMARY = "copy a data folder into an object store, or back"
EPILOG = """\
examples:
  openworld migrate robot s3://bucket/robot
  openworld migrate s3://bucket/robot robot-2
  OPENWORLD_STORE=s3://bucket/robot openworld check --data robot

Stop the programs that use SOURCE first. Every value is verified, and the current version is set last. After an
interruption, run the same command again: what is in TARGET already is compared, not copied. SOURCE is not changed; do
not start a service on it again, because both have the same id and would share a queue.

Copied are versions, images or the features in their place, the images of an inbox that servers share (not from a
folder that keeps features), backbone, and the logs of promotions and erasures. A server's own inbox, keys, audit log
and the embedded Redis server stay in the local folder: go on with the same --data, and OPENWORLD_STORE.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    help = "a folder, or the URL of an object store, like s3://bucket/prefix"
    parser.add_argument("source", metavar="SOURCE", help=help)
    parser.add_argument("target", metavar="TARGET", help=f"{help}; empty, or of an interrupted call")


def run(arguments: argparse.Namespace) -> int:
    # Imported here: the parser of the other commands needs none of it.
    from openworld.migration import migrate

    with TemporaryDirectory() as temporary, count_done("values") as done:
        source = _open(arguments.source, Path(temporary) / "source")
        target = _open(arguments.target, Path(temporary) / "target")
        if source.location("") == target.location(""):
            raise OpenWorldError("SOURCE and TARGET are the same place")
        current = migrate(source, target, done)
    version = "without a version" if current is None else f"version {current} is current"
    print(f"{arguments.target}: {version}. Examine it with `openworld check`")
    return 0


def _open(place: str, folder: Path) -> Storage:
    if "://" not in place:
        return LocalFiles(Path(place))
    return open_storage(folder, place, cache_bytes=0)  # every value is read once
