"""The workload: a data folder with a learned model, and images with their expected labels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving.load import EXPECTED
from benchmarks.serving.made_images import write_images
from benchmarks.serving.peers import ROOT
from models.versions.store import VersionStore

TASKS = (("moss", "slate", "rust"), ("sand", "reed", "ember"), ("frost", "clay", "plum"))
UNKNOWN_CLASS = "tide"  # never learned
LEARNED_FROM, ASKED = range(12), range(100, 107)
MOST_IMAGES = 256
COMMAND_SECONDS = 900
# What serving needs. Images and inbox may be many gigabytes, and no contender reads them.
SERVED = (
    "FORMAT",
    "CURRENT",
    "promotions",
    "backbone.json",
    "backbone.safetensors",
    "versions",
    "tasks",
    "heads",
    "samples",
    "graphs",
)
# Train quickly: serving speed depends on the number of tasks, not on what they learned.
QUICK = {
    "OPENWORLD_BACKBONE": "tf_efficientnet_lite0",
    "OPENWORLD_TRAIN_EPOCHS": "2",
    "OPENWORLD_TRAIN_BACK_EPOCHS": "2",
    "OPENWORLD_TRAIN_GATE_ACCURACY": "1",
    "OPENWORLD_TRAIN_GATE_AUC": "1",
}


@dataclass(frozen=True)
class Workload:
    """A private data folder, and a folder of JPEG files with `expected.json`."""

    data: Path
    images: Path

    def first(self) -> bytes:
        return next(iter(sorted(self.images.glob("*.jpg")))).read_bytes()

    def facts(self) -> dict[str, Any]:
        expected: dict[str, str | None] = json.loads((self.images / EXPECTED).read_bytes())
        sizes = [(self.images / name).stat().st_size for name in expected]
        store = VersionStore(self.data)
        manifest = store.manifest(store.current() or 0)
        return {
            "images": len(sizes),
            "mean_bytes": round(sum(sizes) / len(sizes)),
            "novel_share": round(sum(label is None for label in expected.values()) / len(expected), 3),
            "backbone": manifest.backbone["name"],
            "tasks": len(manifest.tasks),
            "classes": len(manifest.classes),
        }


def prepare(
    work: Path,
    data: Path | None,
    images: Path | None,
    root: Path = ROOT,
    settings: Mapping[str, str] = QUICK,
) -> Workload:
    """Copy the given folders as far as they are needed; make what is not given, with the code of checkout `root`."""
    made = work / "made"
    asked: Sequence[Path]
    if data is None:
        for number, classes in enumerate(TASKS):
            write_images(made / f"task {number}", classes, LEARNED_FROM)
            openworld(root, settings, "learn", str(made / f"task {number}"), "--data", str(work / "data"))
    else:
        _copy(data, work / "data")
    if images is None:
        names = [name for task in TASKS for name in task] + [UNKNOWN_CLASS]
        asked = [path for paths in write_images(made / "asked", names, ASKED).values() for path in paths]
    else:
        found = sorted(path for path in images.rglob("*") if path.suffix.lower() in {".jpg", ".jpeg"})
        asked = found[:: len(found) // MOST_IMAGES + 1]
        if not asked:
            raise SystemExit(f"no JPEG files in {images}")
    target = work / "images"
    target.mkdir()
    for number, path in enumerate(asked):
        shutil.copyfile(path, target / f"{number:04d}.jpg")
    printed = openworld(root, {}, "predict", str(target), "--data", str(work / "data"), "--json")
    answers = [json.loads(line) for line in printed.splitlines()]
    expected = {Path(answer["file"]).name: answer["label"] for answer in answers}
    (target / EXPECTED).write_text(json.dumps(expected))
    return Workload(work / "data", target)


def _copy(source: Path, target: Path) -> None:
    """Copy a data folder, because the service writes novel images into it."""
    target.mkdir()
    for name in SERVED:
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        else:
            shutil.copyfile(source / name, target / name)


def openworld(root: Path, settings: Mapping[str, str], *words: str) -> str:
    """The output of one `openworld` command of a checkout."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENWORLD_")}
    environment |= {**settings, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "openworld", *words]
    done = subprocess.run(
        command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=COMMAND_SECONDS
    )
    return done.stdout
