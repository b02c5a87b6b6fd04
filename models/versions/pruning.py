"""Retention of versions: which are kept, and removing the others with the files that nothing names any more.

Kept are the current version, the last `last` ones, those that an operator marked (`kept/000006`), and the parents of
all these to the first version: any of them can become current again, and what it has learned must stay known.

**Safe beside servers and trainers.** Writers of versions wait meanwhile, and whatever is younger than `YOUNG_SECONDS`
stays: a server may have read a manifest and not its contents yet. A loaded version needs no files. Manifests are
removed before their contents, so that a kill leaves files that nothing names, and never a manifest without its files.
On a shared storage writers do not wait. The manifests are removed first, then writers that began before are refused,
then the contents are removed. So a version is not activated any more once its contents go; if it was activated just
before, its manifest is restored, and nothing else is removed.

**A folder that keeps statistics discards sums at once** (`discard_sums`): contents that only discarded versions name
(models/versions/keep.py), and what rejected results and killed attempts have left. The manifests of discarded versions
stay, so that what was learned stays known; the store refuses to activate such a version, so no writer needs its
contents. A server that is about to read a version that was just replaced reads the new one in its place. On a shared
storage contents that are younger than `YOUNG_SECONDS` stay until then: another machine may be publishing the same ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from models import files
from models.errors import CorruptVersion, StaleParent, StoreError
from models.storage import Stored
from models.versions.contents import FOLDERS, content_key
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import Manifest
from models.versions.reader import GRAPHS, REJECTED, VERSIONS, graph_key, manifest_key, version_number
from models.versions.store import VersionStore

YOUNG_SECONDS = 600.0
KEPT_LAST = 20
MARKS = "kept/"
LOCK = ".prune.lock"  # also held by a backup, which must find the contents of the manifests that it has copied
NOT_OURS = ("work", "redis")  # checkpoints are removed as a whole, and Redis has files of its own


@dataclass
class Pruned:
    """What was removed, or would be."""

    versions: list[int] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)  # keys of contents and graphs
    temporaries: list[str] = field(default_factory=list)
    bytes: int = 0
    note: str | None = None  # why contents were not looked at


def mark_kept(store: VersionStore, n: int) -> None:
    """Keep a version, and its parents, until `unmark_kept`; StoreError if its contents are, or will be, discarded."""
    if reason := why_discarded(recorded_keep(store.storage), store.manifest(n), None):
        raise StoreError(f"version {n} cannot be kept: {reason}")
    try:
        store.storage.put_if_absent(f"{MARKS}{n:06d}", b"")
    except OSError as error:
        raise StoreError(f"version {n} cannot be marked: {error}") from error


def unmark_kept(store: VersionStore, n: int) -> None:
    store.storage.delete([f"{MARKS}{n:06d}"])


def marked_versions(store: VersionStore) -> set[int]:
    names = (found.key.removeprefix(MARKS) for found in store.storage.list(MARKS))
    return {int(name) for name in names if name.isdecimal()}


def prune(store: VersionStore, last: int = KEPT_LAST, *, dry_run: bool = False) -> Pruned:
    """Remove what is not kept. CorruptVersion, and nothing is removed, if it is not known what is current."""
    try:
        with store.storage.locked(LOCK), store.locked():
            before, young = store.current_bytes(), time.time() - YOUNG_SECONDS
            version_number(before)
            kept = _kept(store, last, young)
            places = (*FOLDERS, GRAPHS) if kept else FOLDERS  # a first training stores graphs before it has a version
            return _prune(store, before, kept, list(store.storage.list(REJECTED)), places, young, dry_run)
    except OSError as error:
        raise StoreError(f"the data folder {store.storage.location('')} cannot be pruned: {error}") from error


def discard_sums(store: VersionStore) -> Pruned:
    """Remove the sums that a folder that keeps statistics must not keep; without effect in other folders.

    May be interrupted and repeated. `versions` of the result are attempts that were killed, not discarded versions.
    """
    storage = store.storage
    if recorded_keep(storage) != "statistics":
        return Pruned()
    young = time.time() - YOUNG_SECONDS if storage.shared else math.inf  # no writer runs while the lock is held
    try:
        with storage.locked(LOCK), store.locked():
            before = store.current_bytes()
            version_number(before)
            rejected = [found for found in storage.list(REJECTED) if _has_contents(store, found.key)]
            return _prune(store, before, _promoted(store, young), rejected, FOLDERS, young, dry_run=False)
    except OSError as error:
        raise StoreError(f"sums remain in {storage.location('')} for now: {error}") from error


def drop_discarded_copies(store: VersionStore) -> None:
    """Remove the contents of discarded versions from the local copies of a shared storage."""
    if store.storage.shared and recorded_keep(store.storage) == "statistics":
        keys = [found.key for found in store.storage.list(VERSIONS)]
        discarded = {key for n in discarded_versions(store) for key in _contents(store.manifest(n))}
        store.storage.drop_copies(discarded - _named(store, keys))


def discarded_versions(store: VersionStore) -> list[int]:
    """The versions without contents, oldest first; they stay listed."""
    keep, current, found = recorded_keep(store.storage), store.current(), []
    for n in store.versions() if keep == "statistics" else ():
        with suppress(CorruptVersion):  # damaged
            if why_discarded(keep, store.manifest(n), current):
                found.append(n)
    return found


def _prune(
    store: VersionStore,
    before: bytes | None,
    kept: set[int],
    rejected: Iterable[Stored],
    places: Iterable[str],
    young: float,
    dry_run: bool,
) -> Pruned:
    """`before` is the content of `CURRENT`. Rejected results and contents go unless they are `young`."""
    storage, out = store.storage, Pruned()
    rejected = [found for found in rejected if found.time <= young]
    out.versions = [n for n in store.versions() if n not in kept]
    out.rejected = sorted(found.key.removeprefix(REJECTED).removesuffix(".json") for found in rejected)
    manifests = {found.key: found for found in storage.list(VERSIONS)}
    removed = [*(manifests[manifest_key(n)] for n in out.versions), *rejected]
    going = {found.key for found in removed}
    try:
        named = _named(store, [key for key in _manifest_keys(store) if key not in going])
    except CorruptVersion as error:
        out.note = f"no contents were removed, because it is not known which are needed: {error}"
    else:
        unnamed = [found for place in places for found in storage.list(place) if found.key not in named]
        contents = [found for found in unnamed if found.time <= young]
        out.contents = sorted(found.key for found in contents)
        removed += contents
    temporaries = [
        path for path in files.abandoned(store.root) if path.relative_to(store.root).parts[0] not in NOT_OURS
    ]
    out.temporaries = sorted(str(path.relative_to(store.root)) for path in temporaries)
    out.bytes = sum(found.size for found in removed) + sum(_sizes(temporaries))
    if not dry_run:
        if storage.shared and removed:  # else no writer need be refused
            _delete_shared_manifests(store, [found for found in removed if found.key in going], before, young)
            removed = [found for found in removed if found.key not in going and _still_old(store, found, young)]
        _delete(store, removed, going)
        for path in temporaries:
            files.remove(path)
        for n in marked_versions(store) - set(store.versions()):
            unmark_kept(store, n)
    return out


def _kept(store: VersionStore, last: int, young: float) -> set[int]:
    tips = {*store.lineage()[:1], *store.versions()[-last:], *marked_versions(store), *_younger(store, young)}
    return {n for tip in tips for n in store.lineage(tip)}


def _promoted(store: VersionStore, young: float) -> set[int]:
    """The versions that were current at some time, and young ones; all if the log of promotions is not complete."""
    current, log = store.current(), store.log()
    if current is not None and not any(entry.version == current for entry in log):
        return set(store.versions())
    return {*store.lineage(), *(entry.version for entry in log), *_younger(store, young)}


def _younger(store: VersionStore, young: float) -> set[int]:
    keys = {found.key for found in store.storage.list(VERSIONS) if found.time > young}
    return {n for n in store.versions() if manifest_key(n) in keys}


def _manifest_keys(store: VersionStore) -> Iterator[str]:
    for place in (VERSIONS, REJECTED):
        yield from (found.key for found in store.storage.list(place))


def _named(store: VersionStore, keys: Iterable[str]) -> set[str]:
    """The contents and graphs that these manifests name, without the contents that the folder discards."""
    out: set[str] = set()
    keep, current = recorded_keep(store.storage), store.current()
    for key in keys:
        manifest = Manifest.from_json(store.storage.get(key), name=key)
        out |= {graph_key(sha256) for sha256 in manifest.graphs.values()}
        if not why_discarded(keep, manifest, current):
            out |= _contents(manifest)
    return out


def _contents(manifest: Manifest) -> set[str]:
    return {content_key(role, entry.sha256) for role, entry in manifest.files.items()}


def _has_contents(store: VersionStore, key: str) -> bool:
    """Whether a rejected result names contents, as those from before a conversion do; a damaged one may."""
    try:
        return bool(Manifest.from_json(store.storage.get(key), name=key).files)
    except CorruptVersion:
        return True


def _still_old(store: VersionStore, found: Stored, young: float) -> bool:
    """Whether no writer has stored the value again since it was listed."""
    now = store.storage.find(found.key)
    return now is not None and now.time <= young


def _delete_shared_manifests(store: VersionStore, old: list[Stored], before: bytes | None, young: float) -> None:
    """Delete manifests of a shared storage; StaleParent if `CURRENT` is not `before` any more.

    A writer that saw a manifest has read `CURRENT` before the deletion, so it is refused, or has won already. Then the
    current version and its parents get their manifests back. Others stay deleted: another call of prune may have
    removed their contents.
    """
    deleted = {found.key: store.storage.get(found.key) for found in old if _still_old(store, found, young)}
    try:
        store.storage.delete(deleted)
        store.refuse_earlier_writers(before)
    except (StaleParent, OSError):
        while any(_restore(store, n, deleted) for n in store.lineage()):
            pass  # the parents of a restored version are known now
        raise


def _restore(store: VersionStore, n: int, deleted: Mapping[str, bytes]) -> bool:
    data = deleted.get(manifest_key(n))
    return data is not None and store.storage.put_if_absent(manifest_key(n), data)


def _delete(store: VersionStore, removed: list[Stored], manifests: set[str]) -> None:
    store.storage.delete(found.key for found in removed if found.key in manifests)
    store.storage.delete(found.key for found in removed if found.key not in manifests)


def _sizes(paths: Iterable[Path]) -> Iterator[int]:
    for path in paths:
        with suppress(OSError):
            yield path.stat().st_size
