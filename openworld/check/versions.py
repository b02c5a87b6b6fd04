"""Checks of versions: every one loads and verifies, the log of promotions agrees, no task is learned twice."""

from __future__ import annotations

import re
from collections.abc import Iterator

from models.errors import CorruptVersion
from models.inference.stored_model import read_model
from models.storage import Storage
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import Manifest
from models.versions.reader import REJECTED, VERSIONS, manifest_key
from models.versions.store import VersionStore
from openworld.check.report import Finding, Report
from tasks.errors import UnknownTask
from tasks.queue import TaskQueue


def check_versions(storage: Storage, queue: TaskQueue | None, report: Report) -> Iterator[Finding]:
    store = VersionStore(storage)
    numbers, keep, current = store.versions(), recorded_keep(storage), store.current_or_logged()
    report.checked["versions"] = len(numbers)
    manifests: dict[int, Manifest] = {}
    for n in numbers:
        try:
            manifests[n] = store.manifest(n)
            if not why_discarded(keep, manifests[n], current):
                read_model(store.load(n))
        except CorruptVersion as error:
            if storage.find(manifest_key(n)):  # an attempt that was not promoted may be removed by the next one
                yield Finding("version_damaged", f"version {n}", f"{error}; copy its files from a backup")
    for key in sorted(found.key for found in storage.list(VERSIONS)):
        if not re.fullmatch(r"versions/[0-9]{6,}\.json", key):
            yield Finding("unknown_file", key, "openworld does not use this file: remove it")
    yield from _check_log(store)
    yield from _check_lineage(manifests)
    yield from _check_promoted(store, manifests, queue)
    yield from _check_rejected(store, report)


def current_or_none(store: VersionStore) -> int | None:
    """The current version; None also if CURRENT is damaged, which the check of the log reports."""
    try:
        return store.current()
    except CorruptVersion:
        return None


def _check_log(store: VersionStore) -> Iterator[Finding]:
    """`CURRENT` is the last promotion of the log, and each promotion replaced an earlier one."""
    try:
        current = store.current()
    except CorruptVersion as error:
        yield Finding("current_damaged", "CURRENT", str(error))
        return
    log = store.log()
    if current is None:
        if store.versions():
            yield Finding("no_current", "CURRENT", "there are versions, and none is current: activate one")
        return
    if current not in store.versions():
        yield Finding(
            "current_missing", "CURRENT", f"version {current} is current and does not exist: activate another"
        )
    if not log or log[-1].version != current:
        last = f"version {log[-1].version}" if log else "nothing"
        yield Finding("log_disagrees", "promotions", f"CURRENT names version {current}, the log ends with {last}")
    known: set[int | None] = {None}
    for line in log:
        if line.previous not in known:
            message = f"version {line.version} replaced version {line.previous}, whose promotion is not in the log"
            yield Finding("log_gap", f"promotions, version {line.version}", message)
        known.add(line.version)


def _check_lineage(manifests: dict[int, Manifest]) -> Iterator[Finding]:
    """No version has learned a task twice, and every parent is an earlier version."""
    for n in manifests:
        learned: dict[str, int] = {}
        step: int | None = n
        while step is not None and step in manifests:
            found = manifests[step]
            if found.has_learned(found.task_id) and found.task_id in learned:
                where = f"version {n}, task {found.task_id}"
                yield Finding(
                    "learned_twice", where, f"learned in version {step} and again in {learned[found.task_id]}"
                )
            if found.has_learned(found.task_id):
                learned[found.task_id] = step
            if found.parent is not None and found.parent >= step:
                yield Finding("parent_not_earlier", f"version {step}", f"its parent is version {found.parent}")
                break
            step = found.parent
            if step is not None and step not in manifests:
                yield Finding("parent_missing", f"version {n}", f"version {step}, which it was built on, is missing")


def _check_promoted(store: VersionStore, manifests: dict[int, Manifest], queue: TaskQueue | None) -> Iterator[Finding]:
    """A version that was never current belongs to an attempt that was killed, and its task is tried again."""
    promoted = {line.version for line in store.log()}
    for n, manifest in manifests.items():
        if n in promoted or store.storage.find(manifest_key(n)) is None:
            continue
        try:
            unfinished = queue is None or not queue.get(manifest.task_id).ended
        except UnknownTask:
            unfinished = False
        message = "it was never current: the next version that is published replaces it"
        if store.storage.shared:
            message = "it was never current, another writer was faster or it was killed: `openworld prune` removes it"
        yield Finding("never_promoted", f"version {n}", message, note=unfinished or store.storage.shared)


def _check_rejected(store: VersionStore, report: Report) -> Iterator[Finding]:
    keys = [found.key for found in store.storage.list(REJECTED)]
    report.checked["rejected"] = len(keys)
    for key in keys:
        try:
            manifest = Manifest.from_json(store.storage.get(key), name=key)
            for role, entry in manifest.files.items():
                store.content(role, entry, key)
        except (CorruptVersion, OSError) as error:
            if store.storage.find(key) is not None:
                yield Finding("rejected_damaged", key, f"{error}: `openworld prune` removes it")
