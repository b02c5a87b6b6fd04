"""Reading versions: manifests, contents, the current version, the log of promotions. Needs no lock.

Layout and promises: models/versions/store.py.
"""

import re
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from numpy.typing import NDArray

from models.errors import CorruptVersion, NothingLearned, StoreError
from models.files import sha256_bytes, sha256_file
from models.storage import DataFolder, storage_of
from models.versions.contents import HEADS, SAMPLES, content_key, decode_tensors, flat, samples_text
from models.versions.data_format import check_format
from models.versions.keep import recorded_keep, why_discarded
from models.versions.manifest import FileEntry, Manifest, parse_json
from models.versions.promotions import Promotion, PromotionLog, effective

CURRENT, VERSIONS, REJECTED, GRAPHS = "CURRENT", "versions/", "rejected/", "graphs/"
MOST_ANCESTORS = 10_000


class _Ancestor(NamedTuple):
    parent: int | None
    task_id: str


_ancestors: dict[tuple[int, str], _Ancestor] = {}  # by version and the hash of its manifest


@dataclass(frozen=True)
class LoadedVersion:
    """A version whose files match the hashes in its manifest."""

    manifest: Manifest
    contents: dict[str, dict[str, NDArray[Any]]]  # tensors by role, without the contents that `load` was told to skip
    samples: Any

    @property
    def tensors(self) -> dict[str, NDArray[Any]]:
        """All tensors by flat names, as `VersionStore.publish` takes them."""
        return flat(self.contents)


class VersionReader:
    """The versions of a data folder; write access to it is not needed."""

    def __init__(self, folder: DataFolder) -> None:
        check_format(folder)
        self.storage = storage_of(folder)
        self._log = PromotionLog(self.storage)
        self._prefetched = not self.storage.shared

    @property
    def root(self) -> Path:
        """The local folder: see `Storage.root`."""
        return self.storage.root

    def current(self) -> int | None:
        return version_number(self.current_bytes())

    def versions(self) -> list[int]:
        """The numbers of all versions, oldest first; a listed version may be damaged or never promoted."""
        keys = (found.key for found in self.storage.list(VERSIONS))
        return sorted(int(key[len(VERSIONS) : -5]) for key in keys if re.fullmatch(r"versions/[0-9]{6,}\.json", key))

    def rejected(self) -> dict[str, Manifest]:
        """The manifests of results that the gate rejected, by task; a damaged one is left out."""
        found: dict[str, Manifest] = {}
        for entry in self.storage.list(REJECTED):
            with suppress(CorruptVersion):
                manifest = Manifest.from_json(self._get(entry.key, entry.key), name=entry.key)
                found[manifest.task_id] = manifest
        return found

    def next_version(self) -> int:
        """A number that no version had before, including deleted ones."""
        return max([0, *self.versions(), *(entry.version for entry in self._log.entries())]) + 1

    def manifest(self, n: int) -> Manifest:
        name = f"version {n}: manifest"
        manifest = Manifest.from_json(self._get(manifest_key(n), name), name=name)
        if manifest.version != n:
            raise CorruptVersion(f"{name} says it is version {manifest.version}, not {n}")
        return manifest

    def current_manifest(self) -> Manifest | None:
        """The manifest of the current version; None before the first one."""
        current = self.current()
        return None if current is None else self.manifest(current)

    def load(
        self, n: int | None = None, *, expect_backbone: str | None = None, skip: Collection[str] = ()
    ) -> LoadedVersion:
        """Load version `n`, by default the current one, and verify every hash; CorruptVersion if it was discarded.

        `skip` are hashes of contents that the caller has verified and decoded before: they are not read.
        """
        if n is not None:
            return self._load(n, expect_backbone, skip)
        while True:
            n = self.current()
            if n is None:
                raise NothingLearned("there is no current version yet: submit a task first")
            try:
                return self._load(n, expect_backbone, skip)
            except CorruptVersion as error:
                if not self.is_superseded(n, error):
                    raise

    def is_superseded(self, n: int, error: CorruptVersion) -> bool:
        """Whether version `n`, which was current, could not be read because it was replaced and discarded since."""
        return error.damage == "missing" and self.current() != n

    def _load(self, n: int, expect_backbone: str | None, skip: Collection[str]) -> LoadedVersion:
        manifest = self.manifest(n)
        try:
            return self._read(manifest, expect_backbone, skip)
        except CorruptVersion as error:
            if error.damage == "missing":  # not before: a swap makes no further requests
                self.check_not_discarded(manifest)
            raise

    def check_not_discarded(self, manifest: Manifest) -> None:
        """CorruptVersion, with the reason, if the contents of the version are or will be removed (`why_discarded`)."""
        if reason := why_discarded(recorded_keep(self.storage), manifest, self.current_or_logged()):
            message = f"version {manifest.version} cannot be used any more, its contents are removed: {reason}"
            raise CorruptVersion(message, "missing")

    def _read(self, manifest: Manifest, expect_backbone: str | None, skip: Collection[str]) -> LoadedVersion:
        n = manifest.version
        if expect_backbone is not None and manifest.backbone_sha256 != expect_backbone:
            raise CorruptVersion(
                f"version {n}: made with the backbone {manifest.backbone_sha256}, but {expect_backbone} is in use",
                "backbone",
            )
        if missing := {HEADS, SAMPLES} - manifest.files.keys():
            raise CorruptVersion(f"version {n}: its manifest lists no {' and no '.join(sorted(missing))}")
        self._verify_graphs(manifest, f"version {n}")
        tensors = {
            role: decode_tensors(self.content(role, entry, f"version {n}"), f"version {n}: {role}")
            for role, entry in manifest.files.items()
            if role != SAMPLES and entry.sha256 not in skip
        }
        return LoadedVersion(manifest, tensors, self.samples(n, manifest))

    def content(self, role: str, entry: FileEntry, what: str) -> bytes:
        """The verified bytes of a content; `what` it belongs to is named in error messages."""
        data = self._get(content_key(role, entry.sha256), f"{what}: {role}")
        entry.check(data, name=f"{what}: {role}")
        return data

    def samples(self, n: int, manifest: Manifest | None = None) -> Any:
        """The verified samples of a version."""
        return parse_json(self.samples_text(n, manifest), name=f"version {n}: {SAMPLES}")

    def samples_text(self, n: int, manifest: Manifest | None = None) -> bytes:
        """The verified samples of a version, as JSON."""
        entry = (manifest or self.manifest(n)).files.get(SAMPLES)
        if entry is None:
            raise CorruptVersion(f"version {n}: its manifest lists no {SAMPLES}")
        return samples_text(self.content(SAMPLES, entry, f"version {n}"), f"version {n}: {SAMPLES}")

    def log(self) -> list[Promotion]:
        """The promotions that took effect, oldest first."""
        current = self.current_or_logged()
        return effective(self._log.entries(), current)

    def lineage(self, n: int | None = None) -> list[int]:
        """Version `n`, by default the current one, its parent, and so on to the first version."""
        return list(self._ancestors(n))

    def find_task(self, task_id: str, submission: str | None = None) -> int | None:
        """The version that learned the task; such a task must not be learned again.

        It is in the lineage, or was published for the given submission: a roll back between the promotion and the
        worker's report must not publish the submission a second time.
        """
        lineage = self._ancestors()
        same = [n for n, ancestor in lineage.items() if ancestor and ancestor.task_id == task_id]
        found = next((n for n in same if self._learned_in(n, task_id)), None)
        if found is not None or not submission:
            return found
        left = sorted({promotion.version for promotion in self.log()} - lineage.keys())
        learned = {n: self._learned_in(n, task_id) for n in left}
        return next((n for n, manifest in learned.items() if manifest and manifest.submission == submission), None)

    def manifest_path(self, n: int) -> Path:
        """Of local files only: a manifest has no local copy."""
        return self.storage.local_path(manifest_key(n))

    def content_path(self, n: int, role: str) -> Path:
        return self.storage.local_path(content_key(role, self.manifest(n).files[role].sha256))

    def graph_path(self, sha256: str) -> Path:
        return self.storage.local_path(graph_key(sha256))

    def current_bytes(self) -> bytes | None:
        """The content of `CURRENT`."""
        try:
            return self.storage.get(CURRENT)
        except FileNotFoundError:
            return None
        except OSError as error:
            if not self.storage.shared:
                raise
            raise self._unreadable(CURRENT, error) from error

    # Details

    def current_or_logged(self) -> int | None:
        """The current version; if `CURRENT` is damaged, the last one of the log."""
        try:
            return self.current()
        except CorruptVersion:
            logged = self._log.entries()
            return logged[-1].version if logged else None

    def _promoted(self) -> set[int]:
        """Versions that were current at some time: those in the log and, in case it is lost, the current's parents."""
        return {*self.lineage(), *(promotion.version for promotion in self.log())}

    def _logged_parent(self, n: int) -> int | None:
        """The parent of a damaged version: the version that it first replaced."""
        return next((entry.previous for entry in self._log.entries() if entry.version == n), None)

    def _manifest_or_none(self, n: int, task_id: str | None = None) -> Manifest | None:
        try:
            manifest = self.manifest(n)
        except CorruptVersion:
            return None
        return manifest if task_id in (None, manifest.task_id) else None

    def _ancestors(self, n: int | None = None) -> dict[int, _Ancestor | None]:
        """The lineage of version `n`, by default of the current one, with each version's manifest in brief."""
        found: dict[int, _Ancestor | None] = {}
        n = self.current_or_logged() if n is None else n
        if not self._prefetched:  # one request after the other for a thousand versions would take many seconds
            self._prefetched = True
            self.storage.prefetch(stored.key for stored in self.storage.list(VERSIONS))
        while n is not None and n not in found:
            found[n] = ancestor = self._ancestor(n)
            n = ancestor.parent if ancestor else self._logged_parent(n)
        return found

    def _ancestor(self, n: int) -> _Ancestor | None:
        """What the lineage needs of a manifest; None if that is damaged. Parsed once: a lineage has hundreds."""
        try:
            key = n, sha256_bytes(self._get(manifest_key(n), f"version {n}: manifest"))
            if (found := _ancestors.get(key)) is None:
                manifest = self.manifest(n)
                if len(_ancestors) >= MOST_ANCESTORS:
                    _ancestors.clear()
                found = _ancestors[key] = _Ancestor(manifest.parent, manifest.task_id)
        except CorruptVersion:
            return None
        return found

    def _learned_in(self, n: int, task_id: str) -> Manifest | None:
        ancestor = self._ancestor(n)
        if ancestor is None or ancestor.task_id != task_id:
            return None
        manifest = self._manifest_or_none(n, task_id)
        return manifest if manifest and manifest.has_learned(task_id) else None

    def _get(self, key: str, name: str) -> bytes:
        try:
            return self.storage.get(key)
        except OSError as error:
            raise self._unreadable(name, error) from error

    def _unreadable(self, name: str, error: OSError) -> StoreError:
        """A version that an object store does not give out is not damaged: whether it exists is not known."""
        message = f"{name} cannot be read: {error.strerror}"
        known = isinstance(error, FileNotFoundError) or not self.storage.shared
        return CorruptVersion(message, "missing") if known else StoreError(message)

    def _verify_graphs(self, manifest: Manifest, what: str) -> None:
        for role, sha256 in manifest.graphs.items():
            name = f"{what}: graph {role} ({sha256})"
            try:
                found = sha256_file(self.graph_path(sha256))
            except OSError as error:
                raise self._unreadable(name, error) from error
            if found != sha256:
                raise CorruptVersion(f"{name} does not match its sha256: its bytes were changed", "changed")


def manifest_key(n: int) -> str:
    return f"{VERSIONS}{n:06d}.json"


def graph_key(sha256: str) -> str:
    return f"{GRAPHS}{sha256}.onnx"


def version_number(current: bytes | None) -> int | None:
    """The number of the version in the content of `CURRENT`."""
    return None if current is None else _numbers(current)[0]


def change_number(current: bytes | None) -> int:
    """The number of the last change in the content of `CURRENT`, on a shared storage; 0 if it is not known."""
    try:
        return 0 if current is None else _numbers(current)[1]
    except CorruptVersion:
        return 0


def _numbers(current: bytes) -> tuple[int, int]:
    text = current.decode("ascii", errors="replace").strip()
    found = re.fullmatch(r"([0-9]{1,18})(?: ([0-9]{1,18}))?", text)
    if not found:
        raise CorruptVersion(f"CURRENT: {text[:40]!r} is not a version number; repair: openworld versions --activate N")
    return int(found[1]), int(found[2] or 0)
