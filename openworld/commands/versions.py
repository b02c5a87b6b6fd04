"""`openworld versions`: list the versions, and activate one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import OpenWorldError
from models.storage import Storage
from models.versions.history import history, summary
from models.versions.pruning import mark_kept, marked_versions, unmark_kept
from models.versions.reader import REJECTED
from models.versions.store import VersionStore
from openworld import remote, tables
from openworld.commands import open_data
from service.audit import AuditLog
from service.wire.versions import LEAST_CLASSES_FOR_AUC

if TYPE_CHECKING:
    from service.client import Versions

SUMMARY = "list the versions of a service or a data folder, and the rejected ones"
EPILOG = """\
examples:
  openworld versions                             of the service on this machine, or else of ./data
  openworld versions --data robot                of a data folder
  openworld versions --activate 3                roll back, or forward, to another version
  openworld versions --data robot --keep 3       `openworld prune` keeps version 3 until --release 3
  openworld versions --json | jq '.versions[] | {version, accuracy}'

The source is the service or the data folder that is named, by the first of --url, --data, OPENWORLD_URL and
OPENWORLD_DATA that is given; else a service on this machine, when one is running; else the folder ./data. Rejected
versions are listed from a data folder only; a service lists them as tasks: GET /tasks?state=rejected.

Accuracy (over all classes) and novelty AUC are estimates for fresh images: they are measured on images left out of the
training, and on simulated novelty. With fewer than 5 classes, which say little about novel images, no AUC is shown.
"""
COLUMNS = ["", "version ", "parent ", "created", "change", "classes ", "accuracy ", "novelty AUC ", "capacity "]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--activate", type=int, metavar="N", help="make version N current, then list")
    parser.add_argument("--keep", type=int, metavar="N", help="of a data folder: `openworld prune` keeps version N")
    parser.add_argument("--release", type=int, metavar="N", help="undo --keep N")
    remote.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    marks = arguments.keep is not None or arguments.release is not None
    if marks:
        _mark(VersionStore(open_data(arguments)), arguments.keep, arguments.release)
    url = None if marks else remote.find_service(arguments, read_only=arguments.activate is None)
    if url is None:
        document = _of_folder(open_data(arguments, read_only=arguments.activate is None), arguments.activate)
    else:
        document = _of_service(url, arguments.activate)
    if arguments.json:
        print(json.dumps(document, ensure_ascii=False))
    else:
        _show(document, arguments.data if url is None else None)
    return 0


def _mark(store: VersionStore, keep: int | None, release: int | None) -> None:
    for n in (keep, release):
        if n is not None and n not in store.versions():
            raise OpenWorldError(f"there is no version {n} in {store.root}: name its data folder with --data")
    if keep is not None:
        mark_kept(store, keep)
        AuditLog(store.root).record_command("version.keep", str(keep))
    if release is not None:
        unmark_kept(store, release)
        AuditLog(store.root).record_command("version.release", str(release))


# Both sources give the same document; `active` is the version that a service answers with.


def _of_folder(storage: Storage, activate: int | None) -> dict[str, Any]:
    store, root = VersionStore(storage), storage.root
    if activate is not None:
        if activate not in store.versions():
            raise OpenWorldError(f"there is no version {activate} in {root}: see openworld versions --data {root}")
        store.activate(activate, "operator", "openworld versions --activate")
        AuditLog(root).record_command("version.activate", str(activate))
    current, marked = store.current(), marked_versions(store)
    return {
        "source": storage.location(""),
        "current": current,
        "active": None,
        "versions": [
            entry | ({"kept": True} if entry["version"] in marked else {}) for entry in history(store, current)
        ],
        "rejected": list(_rejected(store)),
    }


def _of_service(url: str, activate: int | None) -> dict[str, Any]:
    with remote.connect(url) as client:
        found = client.versions() if activate is None else client.activate(activate, "openworld versions --activate")
    return {
        "source": url,
        "current": found.current,
        "active": found.serving or None,
        "problem": found.problem.reason if found.problem else None,
        "versions": list(_summaries(found)),
        "rejected": [],
    }


def _summaries(found: Versions) -> Iterator[dict[str, Any]]:
    for version in found.versions:
        fields = version.model_dump(mode="json", exclude={"state", "reason"})
        fields["current"] = version.version == found.current
        if version.reason is not None:
            fields["discarded" if version.state == "discarded" else "damaged"] = version.reason
        if "damaged" not in fields:
            fields["classes"] = sum(map(len, version.tasks))
        yield fields


def _rejected(store: VersionStore) -> Iterator[dict[str, Any]]:
    for task_id, manifest in sorted(store.rejected().items()):
        place = store.storage.location(f"{REJECTED}{task_id}.json")
        yield {**summary(manifest), "reason": manifest.metrics.get("rejected", ""), "manifest": place}


# Tables


def _show(document: dict[str, Any], folder: Path | None) -> None:
    """Print the document; `folder` is None for a service."""
    source, versions, rejected = document["source"], document["versions"], document["rejected"]
    if not versions and not rejected:
        if folder is None:
            print(f"nothing is learned in the service at {source} yet. Start with: openworld teach FOLDER")
        else:
            print(f"nothing is learned in {folder} yet. Start with: openworld learn FOLDER --data {folder}")
        return
    out = tables.console()
    title = f"service at {source}" if folder is None else f"data folder {source}"
    out.print(tables.table(COLUMNS, [_row(version, document["active"]) for version in versions], title=title))
    if problem := document.get("problem"):
        out.print(f"version {document['current']} is current, but cannot be loaded: {problem}", markup=False)
    if rejected:
        rows = [[tables.date(r["created"]), r["task_id"], ", ".join(r["learned"]), r["reason"]] for r in rejected]
        out.print(tables.table(["created", "task", "classes", "reason"], rows, title="rejected"))


def _row(version: dict[str, Any], active: int | None) -> list[str]:
    mark = "active" if version["version"] == active else "current" if version["current"] else ""
    marks = (mark, "kept" if version.get("kept") else "", "discarded" if version.get("discarded") else "")
    mark = " ".join(filter(None, marks))
    if "damaged" in version:
        return [mark, str(version["version"]), "", "", f"damaged: {version['damaged']}", *[""] * 4]
    return [
        mark,
        str(version["version"]),
        str(version["parent"] or "–"),
        tables.date(version["created"]),
        _change(version),
        str(version["classes"]),
        tables.percent(version["accuracy"]),
        tables.ratio(version["novelty_auc"] if version["classes"] >= LEAST_CLASSES_FOR_AUC else None),
        tables.percent(version["capacity"]),
    ]


def _change(version: dict[str, Any]) -> str:
    """What a version changed, in a few words; the console says the same."""
    if version["edit"]:
        return str(version["edit"])
    pending, added = version["task_id"] in version["pending"], version["added"]
    verb = "answers with" if pending else "learned"
    parts = [f"{verb} {tables.names(added)}"] if added else []
    if extended := [name for name in version["learned"] if name not in added]:
        parts.append(f"{verb} more {'images ' if pending else ''}of {tables.names(extended)}")
    return "; ".join(parts)
