"""The versions, and which one is current. A published version is never changed.

    <root>/versions/000007.json    the manifest of version 7
    <root>/rejected/<task>.json    the manifest of a task that the gate rejected
    <root>/tasks/, heads/, samples/    the contents that manifests name (models/versions/contents.py)
    <root>/graphs/<sha256>.onnx
    <root>/promotions/             the log of promotions (models/versions/promotions.py)
    <root>/CURRENT                 the number of the current version, replaced by compare-and-set; on a shared storage
                                   also the number of the change, so that no two changes have the same content

**After a kill at any moment the store is valid, and publishing the task again ends with exactly one version of it.**
Publishing writes in this order: contents, manifest, log, `CURRENT`. What a killed attempt leaves is used by the next
attempt at the same task, or removed by `openworld prune`.

The *lineage* is the current version, its parent, and so on to the first version. A task is learned if a version of the
lineage learned it: after a roll back, tasks of later versions can be learned again. Publishing and activating are
compare-and-set operations on `CURRENT`. Writers of local files hold one lock; readers need none.

On a shared storage (an object store) there is no lock: the writer that creates a manifest has its number, and the one
that replaces `CURRENT` has the current version. A writer that was overtaken fails with StaleParent, however long it was
stopped in between. It removes nothing, because another writer may use the same contents or the same attempt;
`openworld prune` does, later.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from models import files
from models.errors import CorruptVersion, StaleParent, StoreError
from models.files import sha256_bytes
from models.storage import DataFolder
from models.versions.contents import FOLDERS, Tensors, content_key, encode, entries
from models.versions.data_format import open_data_folder
from models.versions.keep import recorded_keep
from models.versions.manifest import Manifest
from models.versions.promotions import Promoter, Promotion
from models.versions.reader import (
    CURRENT,
    GRAPHS,
    REJECTED,
    VERSIONS,
    VersionReader,
    change_number,
    graph_key,
    manifest_key,
    version_number,
)


class VersionStore(VersionReader):
    """Publishes, loads and activates versions. Reading needs no write access to the folder.

    `on_step` is for crash tests: publishing calls it with "started", "written" (contents), "numbered" (manifest),
    "logged", "promoted".
    """

    def __init__(self, folder: DataFolder, on_step: Callable[[str], None] = lambda step: None) -> None:
        super().__init__(folder)
        self._on_step = on_step

    def publish(
        self, manifest: Manifest, tensors: Tensors, samples: Any, *, by: Promoter = "trainer", reason: str | None = None
    ) -> Manifest:
        """Write the next version and make it current; StaleParent unless `manifest.parent` is the current version.

        Contents that the store holds need no tensors: `manifest.files` names them. A failure, such as a full disk,
        leaves no files. The complete manifest of a killed attempt at the same task on the same parent is promoted
        instead of written again.
        """
        self._check_parent(manifest.parent, self.current_bytes())  # a stale attempt fails before it waits for the lock
        return self._publish(manifest, encode(tensors, samples), by, reason or f"learned task {manifest.task_id}")

    def publish_edit(self, manifest: Manifest, by: Promoter, reason: str) -> Manifest:
        """Publish a version that differs from its parent by its manifest only: nothing else is written."""
        return self._publish(manifest, {}, by, reason)

    def _publish(self, manifest: Manifest, contents: Mapping[str, bytes], by: Promoter, reason: str) -> Manifest:
        manifest = manifest.model_copy(update={"files": {**manifest.files, **entries(contents)}})
        with self._writing():
            before = self.current_bytes()
            self._check_parent(manifest.parent, before)
            self._check_submission(manifest)
            self._verify_graphs(manifest, "publish")
            self._check_references(manifest, contents)
            number = self.next_version()  # before attempts are removed: a number is not used again
            published, written = self._resume_attempt(manifest), list[str]()
            try:
                if published is None:
                    self._on_step("started")
                    self._put_contents(contents, written)
                    self._on_step("written")
                    published = self._put_manifest(manifest, number, written)
                    self._on_step("numbered")
                self._promote(published.version, manifest.parent, before, by, reason)
            except BaseException:
                # The fsync after replacing CURRENT may fail as well: then the version is in use.
                in_use = self.storage.shared or (published and self.current_or_logged() == published.version)
                if not in_use:
                    self._discard([*([manifest_key(published.version)] if published else []), *written])
                raise
            return published

    def reject(self, manifest: Manifest, tensors: Tensors, samples: Any, reason: str) -> str:
        """Store the result of a task that the gate rejected, for inspection; it cannot become current.

        A folder that keeps statistics stores its manifest only. Returns the place of the manifest.
        """
        contents, key, written = encode(tensors, samples), f"{REJECTED}{manifest.task_id}.json", list[str]()
        named = {**manifest.files, **entries(contents)}
        if recorded_keep(self.storage) == "statistics":  # the sums of another result may differ by one image
            contents, named = {}, {}
        changes = {"metrics": {**manifest.metrics, "rejected": reason}, "files": named}
        with self._writing():
            try:
                self._put_contents(contents, written)
                self.storage.put(key, manifest.model_copy(update=changes).to_json())
            except BaseException:
                self._discard(written)
                raise
        return self.storage.location(key)

    def activate(self, n: int, by: Promoter, reason: str, replacing: int | None = None) -> Manifest:
        """Make an earlier or later version current, after verifying it; StaleParent unless `replacing` is current.

        By default `replacing` is the version that is current when the call begins: verifying may take seconds.
        """
        replacing = self.current_or_logged() if replacing is None else replacing
        self.load(n)
        with self._writing():
            before = self.current_bytes()
            if (current := self.current_or_logged()) != replacing:
                raise StaleParent(
                    f"version {current} became current in place of {replacing}: look at it, then activate {n} again"
                )
            if self.storage.find(manifest_key(n)) is None:  # again, after `before` was read: it may have been pruned
                raise CorruptVersion(f"version {n}: its manifest was removed", "missing")
            manifest = self.manifest(n)
            self.check_not_discarded(manifest)  # also while its contents are still there
            self._promote(n, current, before, by, reason)
            return manifest

    def refuse_earlier_writers(self, before: bytes | None) -> None:
        """Make every writer fail that has read `CURRENT` so far; StaleParent if it is not `before` any more.

        Call it on a shared storage after deleting manifests, and before deleting their contents: a writer that has seen
        such a manifest is refused, and no later writer sees it.
        """
        if before is None:
            return
        number = change_number(before) or self._log.last_number()
        changed = f"{version_number(before)} {number + 1}\n"
        if not self.storage.compare_and_set(CURRENT, before, changed.encode()):
            raise StaleParent("another version became current before this one: try again")

    def add_graph(self, data: bytes) -> str:
        """Store an ONNX graph by its hash; a damaged copy is replaced."""
        sha256 = sha256_bytes(data)
        with self._writing():
            self._put(graph_key(sha256), data)
        return sha256

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock of all writers, if the storage has one: no version is published until it is released."""
        with self.storage.locked(".lock"):
            yield

    # The steps of publishing

    def _put_contents(self, contents: Mapping[str, bytes], written: list[str]) -> None:
        """`written` collects the keys that did not exist before."""
        for role, data in contents.items():
            key = content_key(role, sha256_bytes(data))
            if self._put(key, data):
                written.append(key)

    def _put(self, key: str, data: bytes) -> bool:
        """Store a content; a damaged one is replaced. Whether the key is new."""
        if self.storage.shared:  # also renews its time, so that it is not pruned before a manifest names it
            self.storage.put(key, data)
            return True
        if self.storage.put_if_absent(key, data):
            return True
        if (found := self.storage.get(key)) != data:
            self.storage.compare_and_set(key, found, data)
        return False

    def _put_manifest(self, manifest: Manifest, number: int, written: list[str]) -> Manifest:
        while True:
            numbered = manifest.model_copy(update={"version": number})
            if self.storage.put_if_absent(manifest_key(number), numbered.to_json()):
                written.append(manifest_key(number))
                return numbered
            number += 1

    def _promote(self, n: int, previous: int | None, before: bytes | None, by: Promoter, reason: str) -> None:
        promotion = Promotion(time=datetime.now(UTC), version=n, previous=previous, by=by, reason=reason)
        current = f"{n}\n"
        if self.storage.shared:
            number = self._log.append(promotion, after=change_number(before) or None)
            current = f"{n} {number}\n"
        else:
            self._log.append(promotion)
        self._on_step("logged")
        if not self.storage.compare_and_set(CURRENT, before, current.encode()):
            raise StaleParent(f"another version became current in place of {previous}: try again")
        self._on_step("promoted")

    def _resume_attempt(self, wanted: Manifest) -> Manifest | None:
        """The manifest of a killed attempt that equals the wanted version; those of other attempts are removed.

        Also those at other tasks, unless the log is lost: their parent is not current any more after this promotion.
        """
        promoted, resumed = self._promoted(), None
        intact = any(entry.version == wanted.parent for entry in self.log())
        for n in self.versions():
            found = None if n in promoted else self._manifest_or_none(n, None if intact else wanted.task_id)
            if found is None:
                continue
            with suppress(CorruptVersion):
                if (found.task_id, found.parent, found.files) == (wanted.task_id, wanted.parent, wanted.files):
                    resumed = self.load(n, expect_backbone=wanted.backbone_sha256).manifest
                    continue
            self._discard([manifest_key(n)])
        return resumed

    def _discard(self, keys: Sequence[str]) -> None:
        """Remove what a failed attempt has written; not on a shared storage, where another writer may use it."""
        if not self.storage.shared:
            with suppress(OSError):
                self.storage.delete(keys)

    def _check_references(self, manifest: Manifest, contents: Mapping[str, bytes]) -> None:
        """Contents that are not written by this publication must be in the store; readers compare their hashes."""
        for role, entry in manifest.files.items():
            if role not in contents:
                found = self.storage.find(content_key(role, entry.sha256))
                if found is None or found.size != entry.size:
                    raise CorruptVersion(f"publish: {role} ({entry.sha256}) is not in the store, or damaged", "missing")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Hold the lock of all writers: a temporary name found under it belongs to a killed process."""
        try:
            open_data_folder(self.storage)
            with self.locked():
                # Other programs write temporary files to the root without this lock: only those of ours are removed.
                ours = (f"{CURRENT}.", "FORMAT.", "ID.", VERSIONS, REJECTED, GRAPHS, "promotions/", *FOLDERS)
                for garbage in list(self.storage.temporaries(ours)):
                    files.remove(garbage)
                yield
        except OSError as error:
            raise StoreError(f"could not write to the version store: {error}") from error

    def _check_submission(self, manifest: Manifest) -> None:
        """A submission becomes one version, also if that was rolled back: a stopped trainer must not repeat it."""
        if manifest.submission is None or not manifest.has_learned(manifest.task_id):
            return
        if (found := self.find_task(manifest.task_id, manifest.submission)) is not None:
            raise StaleParent(f"task {manifest.task_id} was published as version {found} already")

    def _check_parent(self, parent: int | None, current: bytes | None) -> None:
        if (found := version_number(current)) != parent:
            raise StaleParent(f"the task started from version {parent}, but {found} is current: learn it again")
