"""The versions on disk, and which one is current. A version, once there, is never changed.

    <root>/versions/000007/   manifest.json, model.safetensors, samples.json
    <root>/rejected/<task>/   the same files, of a task that the gate refused
    <root>/graphs/<sha256>.onnx
    <root>/CURRENT            the number, replaced as one step
    <root>/promotions.jsonl   who became current, when, by whom and why; append-only

**Killed at any moment, the store is valid, and publishing the task again ends with exactly one version of it.**

The log line is written *before* `CURRENT` (write-ahead), so nobody is ever current without a line. The price is a line
whose promotion was cut short; it gives itself away, because the next line's `previous` (read from `CURRENT`) or
`CURRENT` itself is not its version, and `log()` leaves it out. Writers hold one lock; readers need none.
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

By = Literal["trainer", "operator"]
Tensors = Mapping[str, np.ndarray[Any, Any]]


class Promotion(BaseModel):
    """One line of the log: `version` became current in place of `previous`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: AwareDatetime
    version: int
    previous: int | None
    by: By
    reason: str


@dataclass(frozen=True)
class LoadedVersion:
    """A version whose every byte was checked."""

    manifest: Manifest
    tensors: dict[str, np.ndarray[Any, Any]]
    samples: Any


class VersionStore:
    """Publish, load and switch versions. Making one touches nothing: a server may have `root` read-only.

    `on_step` hears "started", "written", "renamed", "logged", "promoted" as publishing passes them (for crash tests).
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
        """Every numbered folder, oldest first; being listed says nothing about being whole or ever current."""
        if not self._versions.is_dir():
            return []
        return sorted(int(f.name) for f in self._versions.iterdir() if re.fullmatch(r"[0-9]{6,}", f.name))

    def next_version(self) -> int:
        """A number never used before, be it by a version since deleted."""
        return max([0, *self.versions(), *(line.version for line in self._lines())]) + 1

    def manifest(self, n: int) -> Manifest:
        manifest = Manifest.from_json(self._bytes(n, MANIFEST), name=f"version {n}: {MANIFEST}")
        if manifest.version != n:
            raise CorruptVersion(f"version {n}: {MANIFEST} says it is version {manifest.version}, not {n}")
        return manifest

    def current_manifest(self) -> Manifest | None:
        """Of the current version; None before the first."""
        current = self.current()
        return None if current is None else self.manifest(current)

    def load(self, n: int | None = None, *, expect_backbone: str | None = None) -> LoadedVersion:
        """The version `n`, or the current one, after checking every hash; the server and the gate both come here."""
        n = self.current() if n is None else n
        if n is None:
            raise NothingLearned("no version is current yet: submit a task first")
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
        # CURRENT before the lines: read the other way round, a promotion in between would hide its predecessor.
        current = self._current_or_last()
        lines = self._lines()
        followers = [*(line.previous for line in lines[1:]), current]
        return [line for line, follower in zip(lines, followers, strict=False) if follower == line.version]

    def find_task(self, task_id: str) -> int | None:
        """The version that learned this task, if it was ever current: such a task must not be learned again."""
        return next((n for n in sorted(self._promoted()) if self._manifest_or_none(n, task_id)), None)

    def graph_path(self, sha256: str) -> Path:
        return self._graphs / f"{sha256}.onnx"

    # Writing

    def publish(
        self, manifest: Manifest, tensors: Tensors, samples: Any, *, by: By = "trainer", reason: str | None = None
    ) -> Manifest:
        """Make the next version and make it current, provided that `manifest.parent` still is.

        StaleParent otherwise, and nothing is left behind; nor is it when the disk is full. A folder that an earlier,
        killed attempt at the same task on the same parent put in place is promoted as it is.
        """
        self._require_current(manifest.parent)  # Before the lock and the bytes: a zombie need not wait to be refused.
        contents = _encode(tensors, samples)
        with self._writing(self._versions):
            self._require_current(manifest.parent)
            self._verify_graphs(manifest, "publish")
            published = self._unfinished(manifest.sealed(contents)) or self._place(manifest, contents)
            try:
                self._promote(published.version, manifest.parent, by, reason or f"learned task {manifest.task_id}")
            except BaseException:
                # The fsync after replacing CURRENT can fail too; by then the version is in use.
                if self._current_or_last() != published.version:
                    files.discard(self.folder(published.version))
                raise
            return published

    def reject(self, manifest: Manifest, tensors: Tensors, samples: Any, reason: str) -> Path:
        """Keep what the gate refused, for people to look at; it is no version and can never become current."""
        manifest = manifest.model_copy(update={"metrics": {**manifest.metrics, "rejected": reason}})
        folder = self._rejected / manifest.task_id
        contents = _encode(tensors, samples)
        with self._writing(self._rejected):
            files.write_folder(folder, contents | {MANIFEST: manifest.sealed(contents).to_json()})
        return folder

    def activate(self, n: int, by: By, reason: str) -> Manifest:
        """Roll back or forward to a version that is on disk and whole."""
        with self._writing(self._versions):
            manifest = self.load(n).manifest
            self._promote(n, self._current_or_last(), by, reason)
            return manifest

    def add_graph(self, data: bytes) -> str:
        """Store an ONNX graph under its hash; a damaged copy already there is replaced."""
        sha256 = sha256_bytes(data)
        path = self.graph_path(sha256)
        with self._writing(self._graphs):
            if not path.is_file() or sha256_file(path) != sha256:
                files.write_durable(path, data)
        return sha256

    # The steps of publishing

    def _place(self, manifest: Manifest, contents: dict[str, bytes]) -> Manifest:
        manifest = manifest.model_copy(update={"version": self.next_version()}).sealed(contents)
        folder = self.folder(manifest.version)
        files.write_folder(folder, contents | {MANIFEST: manifest.to_json()}, self._on_step)
        return manifest

    def _promote(self, n: int, previous: int | None, by: By, reason: str) -> None:
        line = Promotion(time=datetime.now(UTC), version=n, previous=previous, by=by, reason=reason)
        files.append_durable(self._log, line.model_dump_json().encode())
        self._on_step("logged")
        files.write_durable(self._current, f"{n}\n".encode())
        self._on_step("promoted")

    def _unfinished(self, wanted: Manifest) -> Manifest | None:
        """What a killed attempt at this task left in place, if it is whole and still fits; otherwise it goes."""
        promoted = self._promoted()
        for n in self.versions():
            found = None if n in promoted else self._manifest_or_none(n, wanted.task_id)
            if found is None:
                continue
            with suppress(CorruptVersion):
                if found.parent == wanted.parent and found.files == wanted.files:
                    return self.load(n, expect_backbone=wanted.backbone_sha256).manifest
            files.discard(self.folder(n))
        return None

    @contextmanager
    def _writing(self, folder: Path) -> Iterator[None]:
        """Every writer comes through here, so a temporary name seen under the lock belongs to a dead one."""
        try:
            open_data_folder(self.root)
            files.make_folder(folder)
            with files.file_lock(self.root / ".lock"):
                # Of the root only CURRENT is ours: others keep files there and do not take this lock.
                for place in (".CURRENT.", "versions/.", "rejected/.", "graphs/."):
                    for garbage in self.root.glob(f"{place}*{files.TEMPORARY}"):
                        files.remove(garbage)
                yield
        except OSError as error:
            raise StoreError(f"could not write to the version store: {error}") from error

    # Details

    def folder(self, n: int) -> Path:
        """Where a version is kept."""
        return self._versions / f"{n:06d}"

    def _lines(self) -> list[Promotion]:
        """Every line that can be read: a crash may have torn one, and then its promotion did not happen."""
        lines: list[Promotion] = []
        for text in self._log.read_bytes().split(b"\n") if self._log.exists() else []:
            with suppress(ValidationError):
                lines.append(Promotion.model_validate_json(text))
        return lines

    def _current_or_last(self) -> int | None:
        try:
            return self.current()
        except CorruptVersion:
            lines = self._lines()
            return lines[-1].version if lines else None

    def _require_current(self, parent: int | None) -> None:
        current = self.current()
        if current != parent:
            raise StaleParent(f"this work started from version {parent}, but {current} is current now; learn it again")

    def _promoted(self) -> set[int]:
        """Versions that were current at some time: in the log or, as a log can be lost, an ancestor of the current."""
        line: set[int] = set()
        n = self._current_or_last()
        while n is not None and n not in line:
            line.add(n)
            manifest = self._manifest_or_none(n)
            n = manifest.parent if manifest else None
        return line | {promotion.version for promotion in self.log()}

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

    def _verify_graphs(self, manifest: Manifest, who: str) -> None:
        for role, sha256 in manifest.graphs.items():
            try:
                found = sha256_file(self.graph_path(sha256))
            except OSError as error:
                raise CorruptVersion(
                    f"{who}: graph {role} ({sha256}) cannot be read: {error.strerror}", "missing"
                ) from error
            if found != sha256:
                raise CorruptVersion(
                    f"{who}: graph {role} ({sha256}) does not match its sha256; its bytes were changed", "changed"
                )


def _encode(tensors: Tensors, samples: Any) -> dict[str, bytes]:
    try:
        # safetensors writes the memory as it lies: a transposed view would come back silently scrambled.
        dense = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        return {TENSORS: safetensors.numpy.save(dense), SAMPLES: canonical_json(samples, what="the samples")}
    except SafetensorError as error:
        raise StoreError(f"the tensors cannot be written: {error}") from error
