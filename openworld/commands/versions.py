"""`openworld versions`: what was learned when, which version is current, and what was rejected."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.errors import CorruptVersion, NothingLearned, OpenWorldError
from models.versions.lineage import lineage, summary
from models.versions.manifest import Manifest
from models.versions.store import MANIFEST, VersionStore
from openworld import tables

SUMMARY = "list the versions, the current one marked, and what was rejected"
EPILOG = """\
examples:
  openworld versions --data robot
  openworld versions --activate 3                roll back, or forward, to a version that is there
  openworld versions --json | jq '.versions[] | {version, accuracy}'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--activate", type=int, metavar="N", help="make version N current, then list")


def run(arguments: argparse.Namespace) -> int:
    store = VersionStore(arguments.data)
    if arguments.activate is not None:
        if arguments.activate not in store.versions():
            raise OpenWorldError(
                f"there is no version {arguments.activate} in {arguments.data}: see openworld versions"
            )
        store.activate(arguments.activate, "operator", "openworld versions --activate")
    versions, rejected = list(lineage(store, store.current())), list(_rejected(arguments.data))
    if arguments.json:
        document = {"current": store.current(), "versions": versions, "rejected": rejected}
        print(json.dumps(document, ensure_ascii=False))
        return 0
    if not versions and not rejected:
        print(f"nothing is learned in {arguments.data} yet. Start with: openworld learn FOLDER --data {arguments.data}")
        print("A service that keeps its data elsewhere: name its folder with --data, or ask it: GET /versions")
        return 0
    out = tables.console()
    columns = [
        "",
        "version ",
        "parent ",
        "created",
        "learned",
        "classes ",
        "accuracy ",
        "AUC ",
        "threshold ",
        "used ",
    ]
    out.print(tables.table(columns, [_row(version) for version in versions]))
    if rejected:
        rows = [[tables.date(r["created"]), r["task_id"], ", ".join(r["learned"]), r["reason"]] for r in rejected]
        out.print(tables.table(["created", "task", "classes", "reason"], rows, title="rejected"))
    return 0


def current_or_start(store: VersionStore) -> int:
    """The current version, or an error that says how to get one."""
    current = store.current()
    if current is None:
        raise NothingLearned(f"nothing is learned yet. Start with: openworld learn FOLDER --data {store.root}")
    return current


def _rejected(root: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((root / "rejected").glob(f"[!.]*/{MANIFEST}")):
        try:
            manifest = Manifest.from_json(path.read_bytes(), name=str(path))
        except (CorruptVersion, OSError):
            continue  # only kept to be looked at: nothing depends on it
        yield {**summary(manifest), "reason": manifest.metrics.get("rejected", ""), "folder": str(path.parent)}


def _row(version: dict[str, Any]) -> list[str]:
    mark = "current" if version["current"] else ""
    if "damaged" in version:
        return [mark, str(version["version"]), "", "", f"damaged: {version['damaged']}", *[""] * 5]
    added = set(version["added"])
    extended = [name for name in version["learned"] if name not in added]
    learned = tables.names(version["added"]) if added else ""
    if extended:
        learned += f"{'; ' if learned else ''}more of {tables.names(extended)}"
    return [
        mark,
        str(version["version"]),
        str(version["parent"] or "–"),
        tables.date(version["created"]),
        learned,
        str(version["classes"]),
        tables.percent(version["accuracy"]),
        tables.ratio(version["auc"]),
        tables.ratio(version["threshold"]),
        tables.percent(version["capacity"]),
    ]
