"""`openworld prune`: remove old versions, and files that nothing names any more."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from models.errors import OpenWorldError
from models.versions.pruning import KEPT_LAST, prune
from models.versions.store import VersionStore
from openworld.commands import open_data, require_data
from openworld.environment import settings_from
from openworld.tables import count, size
from service.audit import AuditLog
from tasks.settings import StorageSettings

SUMMARY = "remove old versions of a data folder, and files that nothing names any more"
EPILOG = f"""\
examples:
  openworld prune --data robot --dry-run         show what would be removed
  openworld prune --data robot --last 5
  openworld versions --data robot --keep 12      keep version 12 until `--release 12`

Kept are the current version, the last {KEPT_LAST} ones (--last), those that are marked with `openworld versions
--keep`, and the parents of all of these. Removed are other versions, rejected ones, what killed processes left, and
contents and graphs that no remaining version names. Images are not touched: see DELETE /images.

The service may run: nothing is removed that it may still read, and nothing that is younger than ten minutes.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--last", type=int, default=KEPT_LAST, metavar="N", help=f"versions to keep (default {KEPT_LAST})"
    )
    parser.add_argument("--dry-run", action="store_true", help="remove nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.last < 1:
        raise OpenWorldError("--last must be at least 1")
    require_data(settings_from(StorageSettings, {"data": arguments.data}))
    storage = open_data(arguments)
    pruned = prune(VersionStore(storage), arguments.last, dry_run=arguments.dry_run)
    if not arguments.dry_run:
        AuditLog(arguments.data).record_command("versions.prune", f"last {arguments.last}")
    if arguments.json:
        print(json.dumps({**asdict(pruned), "dry_run": arguments.dry_run}))
        return 0
    for what, found in (
        ("version", [str(n) for n in pruned.versions]),
        ("rejected version", pruned.rejected),
        ("content", pruned.contents),
        ("temporary file", pruned.temporaries),
    ):
        if found:
            print(f"{count(len(found), what)}: {', '.join(found)}")
    if pruned.note:
        print(pruned.note)
    print(f"{size(pruned.bytes)} {'would be ' if arguments.dry_run else ''}freed in {storage.location('')}")
    return 0
