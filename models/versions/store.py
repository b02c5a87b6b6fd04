"""The versions on disk, and which one is current. A published version is never changed.

    <root>/versions/000007/   manifest.json, model.safetensors, samples.json
    <root>/rejected/<task>/   the same files, of a task that the gate rejected
    <root>/graphs/<sha256>.onnx
    <root>/CURRENT            the number of the current version, replaced atomically
    <root>/promotions.jsonl   the log of promotions: version, previous, time, by, reason; append-only

**After a kill at any moment the store is valid, and publishing the task again ends with exactly one version of it.**

The *lineage* is the current version, its parent, and so on to the first version. A task is learned if a version of the
lineage learned it: after a roll back, tasks of later versions can be learned again. Publishing and activating are
compare-and-set operations on `CURRENT`.

A promotion is logged *before* `CURRENT` is replaced (write-ahead), so every current version has a line in the log. A
kill in between leaves a line without effect, whose version is neither the `previous` of the next line (read from
`CURRENT`) nor the current version; `log()` omits it. Writers hold one lock; readers need none.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import safetensors.numpy
from pydantic import AwareDatetime, BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError

from models import files
from models.errors import CorruptVersion, NothingLearned, StaleParent, StoreError
from models.files import sha256_bytes, sha256_file
from models.versions.data_format import check_format, open_data_folder
from models.versions.manifest import Manifest, canonical_json, parse_json

MANIFEST, TENSORS, SAMPLES = "manifest.json", "model.safetensors", "samples.json"

Promoter = Literal["trainer", "operator"]
Tensors = Mapping[str, np.ndarray[Any, Any]]


class Promotion(BaseModel):
    """A line of the log: `version` became current in place of `previous`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: AwareDatetime
    version: int
    previous: int | None
    by: Promoter
    reason: str


@dataclass(frozen=True)
class LoadedVersion:
    """A version whose files match the hashes in its manifest."""

    manifest: Manifest
    tensors: dict[str, np.ndarray[Any, Any]]
    samples: Any


class VersionStore:
    """Publishes, loads and activates versions. Reading needs no write access to `root`.

    `on_step` is for crash tests: publishing calls it with "started", "written", "renamed", "logged", "promoted".
    """

    def __init__(self, root: Path, on_step: Callable[[str], None] = lambda step: None) -> None:
        check_format(root)
        self.root = root
        self._on_step = on_step
        self._versions, self._rejected, self._graphs = root / "versions", root / "rejected", root / "graphs"
        self._current, self._log = root / "CURRENT", root / "promotions.jsonl"

    # Reading

    def current(self) -> int | None:
        try:
            text = self._current.read_text("ascii", errors="replace").strip()
        except FileNotFoundError:
            return None
        if not re.fullmatch(r"[0-9]{1,18}", text):
            raise CorruptVersion(
                f"CURRENT: {text[:40]!r} is not a version number; repair: openworld versions --activate N"
            )
        return int(text)

    def versions(self) -> list[int]:
        """The numbers of all version folders, oldest first; a listed version may be damaged or never promoted."""
        if not self._versions.is_dir():
            return []
        return sorted(int(f.name) for f in self._versions.iterdir() if re.fullmatch(r"[0-9]{6,}", f.name))

    def rejected(self) -> list[Path]:
        """The folders of rejected results, named by their tasks."""
        return sorted(folder for folder in self._rejected.glob("[!.]*") if folder.is_dir())

    def next_version(self) -> int:
        """A number that no version had before, including deleted ones."""
        return max([0, *self.versions(), *(line.version for line in self._lines())]) + 1

    def manifest(self, n: int) -> Manifest:
        manifest = Manifest.from_json(self._bytes(n, MANIFEST), name=f"version {n}: {MANIFEST}")
        if manifest.version != n:
            raise CorruptVersion(f"version {n}: {MANIFEST} says it is version {manifest.version}, not {n}")
        return manifest

    def current_manifest(self) -> Manifest | None:
        """The manifest of the current version; None before the first one."""
        current = self.current()
        return None if current is None else self.manifest(current)

    def load(self, n: int | None = None, *, expect_backbone: str | None = None) -> LoadedVersion:
        """Load version `n`, by default the current one, and verify every hash."""
        n = self.current() if n is None else n
        if n is None:
            raise NothingLearned("there is no current version yet: submit a task first")
        manifest = self.manifest(n)
        if expect_backbone is not None and manifest.backbone_sha256 != expect_backbone:
            raise CorruptVersion(
                f"version {n}: made with the backbone {manifest.backbone_sha256}, but {expect_backbone} is in use",
                "backbone",
            )
        if set(manifest.files) != {TENSORS, SAMPLES}:
            raise CorruptVersion(f"version {n}: {MANIFEST} lists {sorted(manifest.files)}, not {[TENSORS, SAMPLES]}")
        data = {name: self._bytes(n, name) for name in manifest.files}
        for name, entry in manifest.files.items():
            entry.check(data[name], name=f"version {n}: {name}")
        self._verify_graphs(manifest, f"version {n}")
        try:
            tensors = safetensors.numpy.load(data[TENSORS])
        except SafetensorError as error:
            raise CorruptVersion(f"version {n}: {TENSORS}: {error}") from error
        return LoadedVersion(manifest, tensors, parse_json(data[SAMPLES], name=f"version {n}: {SAMPLES}"))

    def log(self) -> list[Promotion]:
        """The promotions that took effect, oldest first."""
        # CURRENT is read before the lines: in the other order, a promotion in between would hide its predecessor.
        current = self._current_or_logged()
        lines = self._lines()
        followers = [*(line.previous for line in lines[1:]), current]
        return [line for line, follower in zip(lines, followers, strict=False) if follower == line.version]

    def lineage(self, n: int | None = None) -> list[int]:
        """Version `n`, by default the current one, its parent, and so on to the first version."""
        found: list[int] = []
        n = self._current_or_logged() if n is None else n
        while n is not None and n not in found:
            found.append(n)
            manifest = self._manifest_or_none(n)
            n = manifest.parent if manifest else self._logged_parent(n)
        return found

    def find_task(self, task_id: str, submission: str | None = None) -> int | None:
        """The version that learned the task; such a task must not be learned again.

        It is in the lineage, or was published for the given submission: a roll back between the promotion and the
        worker's report must not publish the submission a second time.
        """
        found = next((n for n in self.lineage() if self._manifest_or_none(n, task_id)), None)
        if found is not None or not submission:
            return found
        learned = {n: self._manifest_or_none(n, task_id) for n in sorted(self._promoted())}
        return next((n for n, manifest in learned.items() if manifest and manifest.submission == submission), None)

    def graph_path(self, sha256: str) -> Path:
        return self._graphs / f"{sha256}.onnx"

    # Writing

    def publish(
        self, manifest: Manifest, tensors: Tensors, samples: Any, *, by: Promoter = "trainer", reason: str | None = None
    ) -> Manifest:
        """Write the next version and make it current; StaleParent unless `manifest.parent` is the current version.

        A failure, such as a full disk, leaves no files. A complete folder from a killed attempt at the same task on the
        same parent is promoted instead of written again.
        """
        self._check_parent(manifest.parent)  # also before waiting for the lock: a stale attempt fails at once
        contents = _encode(tensors, samples)
        with self._writing(self._versions):
            self._check_parent(manifest.parent)
            self._verify_graphs(manifest, "publish")
            number = self.next_version()  # before attempts are removed: a number is not used again
            published = self._resume_attempt(manifest.with_files(contents))
            published = published or self._write_version(manifest, contents, number)
            try:
                self._promote(published.version, manifest.parent, by, reason or f"learned task {manifest.task_id}")
            except BaseException:
                # The fsync after replacing CURRENT may fail as well: then the version is in use.
                if self._current_or_logged() != published.version:
                    files.discard(self.folder(published.version))
                raise
            return published

    def reject(self, manifest: Manifest, tensors: Tensors, samples: Any, reason: str) -> Path:
        """Store the result of a task that the gate rejected, for inspection; it cannot become current."""
        manifest = manifest.model_copy(update={"metrics": {**manifest.metrics, "rejected": reason}})
        folder = self._rejected / manifest.task_id
        contents = _encode(tensors, samples)
        with self._writing(self._rejected):
            files.write_folder(folder, contents | {MANIFEST: manifest.with_files(contents).to_json()})
        return folder

    def activate(self, n: int, by: Promoter, reason: str, replacing: int | None = None) -> Manifest:
        """Make an earlier or later version current, after verifying it; StaleParent unless `replacing` is current.

        By default `replacing` is the version that is current when the call begins: verifying may take seconds.
        """
        replacing = self._current_or_logged() if replacing is None else replacing
        self.load(n)
        with self._writing(self._versions):
            if (current := self._current_or_logged()) != replacing:
                raise StaleParent(
                    f"version {current} became current in place of {replacing}: look at it, then activate {n} again"
                )
            manifest = self.manifest(n)  # again, under the lock: the folder of a killed attempt may be removed
            self._promote(n, current, by, reason)
            return manifest

    def add_graph(self, data: bytes) -> str:
        """Store an ONNX graph by its hash; a damaged copy is replaced."""
        sha256 = sha256_bytes(data)
        path = self.graph_path(sha256)
        with self._writing(self._graphs):
            if not path.is_file() or sha256_file(path) != sha256:
                files.write_durable(path, data)
        return sha256

    # The steps of publishing

    def _write_version(self, manifest: Manifest, contents: dict[str, bytes], number: int) -> Manifest:
        manifest = manifest.model_copy(update={"version": number}).with_files(contents)
        folder = self.folder(manifest.version)
        files.write_folder(folder, contents | {MANIFEST: manifest.to_json()}, self._on_step)
        return manifest

    def _promote(self, n: int, previous: int | None, by: Promoter, reason: str) -> None:
        line = Promotion(time=datetime.now(UTC), version=n, previous=previous, by=by, reason=reason)
        files.append_durable(self._log, line.model_dump_json().encode())
        self._on_step("logged")
        files.write_durable(self._current, f"{n}\n".encode())
        self._on_step("promoted")

    def _resume_attempt(self, wanted: Manifest) -> Manifest | None:
        """The complete folder of a killed attempt that equals the wanted version; other attempts are removed.

        Also those at other tasks, unless the log is lost: their parent is not current any more after this promotion.
        """
        promoted, resumed = self._promoted(), None
        intact = any(line.version == wanted.parent for line in self.log())
        for n in self.versions():
            found = None if n in promoted else self._manifest_or_none(n, None if intact else wanted.task_id)
            if found is None:
                continue
            with suppress(CorruptVersion):
                if (found.task_id, found.parent, found.files) == (wanted.task_id, wanted.parent, wanted.files):
                    resumed = self.load(n, expect_backbone=wanted.backbone_sha256).manifest
                    continue
            files.discard(self.folder(n))
        return resumed

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Hold the lock of all writers: a temporary name found under it belongs to a killed process."""
        try:
            open_data_folder(self.root)
            files.make_folder(folder)
            with files.file_lock(self.root / ".lock"):
                # Other programs write temporary files to the root without this lock: only those of ours are removed.
                for place in (".CURRENT.", ".FORMAT.", ".ID.", "versions/.", "rejected/.", "graphs/."):
                    for garbage in self.root.glob(f"{place}*{files.TEMPORARY}"):
                        files.remove(garbage)
                yield
        except OSError as error:
            raise StoreError(f"could not write to the version store: {error}") from error

    # Details

    def folder(self, n: int) -> Path:
        return self._versions / f"{n:06d}"

    def _lines(self) -> list[Promotion]:
        """Every complete line; an incomplete one was cut off by a crash, before its promotion took effect."""
        lines: list[Promotion] = []
        for text in self._log.read_bytes().split(b"\n") if self._log.exists() else []:
            with suppress(ValidationError):
                lines.append(Promotion.model_validate_json(text))
        return lines

    def _current_or_logged(self) -> int | None:
        try:
            return self.current()
        except CorruptVersion:
            lines = self._lines()
            return lines[-1].version if lines else None

    def _check_parent(self, parent: int | None) -> None:
        current = self.current()
        if current != parent:
            raise StaleParent(f"the task started from version {parent}, but {current} is current: learn it again")

    def _promoted(self) -> set[int]:
        """Versions that were current at some time: those in the log and, in case it is lost, the current's parents."""
        return {*self.lineage(), *(promotion.version for promotion in self.log())}

    def _logged_parent(self, n: int) -> int | None:
        """The parent of a damaged version: the version that it first replaced."""
        return next((line.previous for line in self._lines() if line.version == n), None)

    def _manifest_or_none(self, n: int, task_id: str | None = None) -> Manifest | None:
        try:
            manifest = self.manifest(n)
        except CorruptVersion:
            return None
        return manifest if task_id in (None, manifest.task_id) else None

    def _bytes(self, n: int, name: str) -> bytes:
        try:
            return (self.folder(n) / name).read_bytes()
        except OSError as error:
            raise CorruptVersion(f"version {n}: {name} cannot be read: {error.strerror}", "missing") from error

    def _verify_graphs(self, manifest: Manifest, what: str) -> None:
        for role, sha256 in manifest.graphs.items():
            graph = f"{what}: graph {role} ({sha256})"
            try:
                found = sha256_file(self.graph_path(sha256))
            except OSError as error:
                raise CorruptVersion(f"{graph} cannot be read: {error.strerror}", "missing") from error
            if found != sha256:
                raise CorruptVersion(f"{graph} does not match its sha256: its bytes were changed", "changed")


def _encode(tensors: Tensors, samples: Any) -> dict[str, bytes]:
    try:
        # safetensors writes the memory of an array in order: the values of a transposed view would be permuted.
        dense = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        return {TENSORS: safetensors.numpy.save(dense), SAMPLES: canonical_json(samples, what="the samples")}
    except SafetensorError as error:
        raise StoreError(f"the tensors cannot be written: {error}") from error
