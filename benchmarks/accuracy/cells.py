"""Run cells, and resume: a finished cell is a file, and is skipped while its fingerprint stays the same."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy import baselines, methods, product_v1, without_images
from benchmarks.accuracy.bootstrap import Outcomes
from benchmarks.accuracy.data import ImageSet, open_tokens, recorded_now
from benchmarks.accuracy.metrics import Step, is_known, measure
from benchmarks.accuracy.streams import DEIT, Cell, Stream, open_set
from benchmarks.machine import machine
from models.files import write_durable
from trainer.learning.prior import Prior
from trainer.learning.progress import Event
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache

ROOT = Path(__file__).resolve().parents[2]
PRIORS = Path(__file__).with_name("priors.json")
PRIOR = ("trainer", "learning", "prior.py")  # among the settings of a cell, and replaced by that of other data sets
MACHINE_SETTINGS = {"backbone_weights", "device", "threads"}
# What the figures of a group depend on, beside the product.
SOURCES = {
    "closed": ("baselines.py",),
    "product-v1": ("product_v1.py",),
    **dict.fromkeys(without_images.GROUPS, ("methods.py", "without_images.py", "odin.py")),
}


@dataclass(frozen=True)
class Setup:
    """Where a run reads and writes."""

    data: Path
    out: Path
    weights: Path  # a folder with DeiT's file
    old: Path | None  # a checkout for product-v1
    threads: int
    given: Mapping[str, Any]  # settings of the learner that replace the defaults of every group; none in a real run

    def file(self, cell: Cell) -> Path:
        return self.out / "cells" / f"{cell.name}.json"

    def weights_of(self, backbone: str) -> Path | None:
        """None for a backbone whose weights are a package."""
        return self.weights / f"{DEIT}.safetensors" if backbone == DEIT else None

    def settings(self, cell: Cell) -> LearnerSettings:
        return methods.settings_of(cell.group, cell.order, prior_for(cell.data)[0], threads=self.threads, **self.given)

    def fingerprint(self, cell: Cell, images_sha256: str) -> str:
        """Of everything that the figures depend on."""
        root = self.old if cell.group == "product-v1" and self.old else ROOT
        parts: dict[str, Any] = {
            "cell": asdict(cell),
            "data": images_sha256,
            "code": source_hash([root / "models", root / "trainer"]),
            "benchmark": source_hash(
                Path(__file__).with_name(name)
                for name in ("streams.py", "metrics.py", *SOURCES.get(cell.group, ("methods.py",)))
            ),
        }
        if cell.group in ("ours", "paper", "hat", *without_images.GROUPS):
            parts["settings"] = self.settings(cell).model_dump(mode="json", exclude=MACHINE_SETTINGS)
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def prior_for(data: str, file: Path = PRIORS) -> tuple[Prior, str]:
    """The prior computed without this data set, and which one it is; the product's own where there is none."""
    if file.is_file():
        entries = json.loads(file.read_text())["priors"]
        name = f"without {data}"
        if name in entries:
            return Prior(**entries[name]), name
        return Prior(**entries["all"]), "all"
    return Prior(), "the product's (priors.json is missing: run benchmarks.accuracy.prior)"


def source_hash(paths: Any) -> str:
    """Of Python files and of all those in folders."""
    return _source_hash(tuple(paths))


@cache
def _source_hash(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        for file in files:
            if file.parts[-3:] == PRIOR:
                continue
            digest.update(str(file.relative_to(path.parent)).encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()


def commit(root: Path = ROOT) -> str:
    """The last commit that changed the product's code; with "+" if the working tree has other code."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "models", "trainer")
    return (git("log", "-1", "--format=%h", "--", "models", "trainer") or "unknown") + ("+" if changed else "")


@dataclass
class Runner:
    """Runs cells one after the other, with one image set in memory at a time."""

    setup: Setup
    _image_set: ImageSet | None = None
    _open_tokens: tuple[str, TokenCache] | None = None  # by data set and backbone

    def run(self, cells: Sequence[Cell]) -> int:
        """Run what is not finished; returns the number of cells that failed."""
        todo = [cell for cell in cells if not self._skipped(cell)]
        print(f"{len(cells) - len(todo)} cells are finished or left out, {len(todo)} to run", file=sys.stderr)
        seconds: dict[str, list[float]] = {}
        failed = 0
        for number, cell in enumerate(todo, 1):
            started = time.monotonic()
            try:
                self._run(cell)
            except Exception:  # the other cells still count, and the next call runs this one again
                traceback.print_exc()
                failed += 1
            seconds.setdefault(cell.group, []).append(time.monotonic() - started)
            left = time_left(seconds, todo[number:])
            print(
                f"[{number}/{len(todo)}] {cell.name}: {seconds[cell.group][-1]:.0f} s, about {left / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
        return failed

    def _skipped(self, cell: Cell) -> bool:
        if cell.group == "product-v1" and self.setup.old is None:
            print(f"{cell.name}: skipped, give --old CHECKOUT of commit e6c0161 to run it", file=sys.stderr)
            return True
        file = self.setup.file(cell)
        if not file.is_file():
            return False
        same: bool = json.loads(file.read_bytes())["fingerprint"] == self._fingerprint(cell)
        return same

    def _fingerprint(self, cell: Cell) -> str:
        return self.setup.fingerprint(cell, self._images(cell).sha256)

    def _images(self, cell: Cell) -> ImageSet:
        if self._image_set is None or self._image_set.name != cell.data:
            self._image_set = open_set(cell, self.setup.data)
        return self._image_set

    def _tokens(self, cell: Cell) -> TokenCache:
        name = f"{cell.data} {cell.backbone} {cell.blocks}"
        if self._open_tokens is None or self._open_tokens[0] != name:
            weights = self.setup.weights_of(cell.backbone)
            backbone = recorded_now(self.setup.out, cell.backbone, weights, cell.blocks)
            self._open_tokens = name, open_tokens(backbone, self._images(cell), self.setup.out / "tokens")
        return self._open_tokens[1]

    def _run(self, cell: Cell) -> None:
        images, tokens = self._images(cell), self._tokens(cell)
        stream = Stream.make(images, cell.tasks, cell.classes, cell.per_class, cell.order)
        tokens.prepare(stream.test_keys)
        started = time.monotonic()
        facts: dict[str, Any] = {}
        if cell.group == "closed":
            steps = baselines.run(tokens, stream)
        elif cell.group == "product-v1" and self.setup.old is not None:
            weights = self.setup.weights_of(cell.backbone)
            job = {
                "backbone": cell.backbone,
                "weights": str(weights.resolve()) if weights else None,
                "adapted_blocks": cell.blocks,
                "seed": cell.order,
                "threads": self.setup.threads,
            }
            file = self.setup.data / f"{cell.data}.safetensors"
            steps = product_v1.run(self.setup.old, file, stream, tokens, job)
        else:
            settings = self.setup.settings(cell)
            steps, facts = methods.run(cell.group, tokens, stream, settings, show, lambda key: len(images.read(key)))
            facts["prior"] = prior_for(cell.data)[1] if settings.rule == "fitted" else None
        document = {
            "cell": asdict(cell),
            "fingerprint": self._fingerprint(cell),
            "commit": commit(self.setup.old or ROOT) if cell.group == "product-v1" else commit(),
            "machine": machine(),
            "seconds": time.monotonic() - started,
            "test_images": len(stream.test_keys),
            "facts": facts,
            "methods": {name: measure(own, stream.labels).to_dict() for name, own in steps.items()},
        }
        self.setup.file(cell).parent.mkdir(parents=True, exist_ok=True)
        # The JSON file last: it says that the cell is finished.
        write_durable(self.setup.file(cell).with_suffix(".npz"), packed(steps, stream))
        write_durable(self.setup.file(cell), (json.dumps(document, indent=1) + "\n").encode())


def time_left(seconds: Mapping[str, Sequence[float]], todo: Sequence[Cell]) -> float:
    """From the mean seconds of the cells of the same group, or of all."""
    every = [value for values in seconds.values() for value in values]
    return float(sum(np.mean(seconds.get(cell.group) or every) for cell in todo))


def packed(steps: Mapping[str, Sequence[Step]], stream: Stream) -> bytes:
    """What each method did with each test image, for intervals."""
    arrays: dict[str, Any] = {}
    for name, own in steps.items():
        arrays[f"{name}/correct"] = own[-1].log_scores.argmax(axis=1) == stream.labels
        arrays[f"{name}/novelty"] = np.stack([step.novelty for step in own]).astype(np.float32)
        arrays[f"{name}/known"] = np.stack([is_known(step, stream.labels) for step in own])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def outcomes(file: Path, method: str) -> Outcomes:
    """The inverse of `packed`, for one method of a finished cell."""
    with np.load(file.with_suffix(".npz")) as arrays:
        return Outcomes(*(arrays[f"{method}/{name}"] for name in ("correct", "novelty", "known")))


def show(event: Event) -> None:
    """Print progress on one line, replaced by the next."""
    if sys.stderr.isatty():
        text = f"task {event.task}, {event.phase}: {event.epoch}/{event.epochs}"
        print(f"{text:60}", end="\r", file=sys.stderr, flush=True)
