"""Version stores of small tensors, and a process that publishes and can be killed at any step."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import StaleParent
from models.storage import DataFolder, LocalFiles, storage_of
from models.versions.class_ids import samples_by_name
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.paths import ROOT

TENSORS = {"head.0": np.arange(6, dtype=np.float32).reshape(2, 3), "mask": np.array([True, False])}
SAMPLES = {"memory": [["cat", "ab12"]]}
STEPS = ["started", "written", "numbered", "logged", "promoted"]  # of a publication

# Publishes a version; kills itself at a step, or waits there ("logged stopped") or before ("race") for a line of input.
TRAINER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from models.errors import StaleParent
from models.storage import open_storage
from models.versions.manifest import Manifest
from models.versions.store import VersionStore

root, manifest, die_at = Path(sys.argv[1]), Manifest.from_json(sys.argv[2].encode()), sys.argv[3]
store = VersionStore(open_storage(root, sys.argv[4]), lambda step: on_step(step))

def on_step(step):
    if step == die_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if step + " stopped" == die_at:
        print("stopped", flush=True)
        sys.stdin.readline()

if die_at == "race":
    print("ready", flush=True)
    sys.stdin.readline()
try:
    print(store.publish(manifest, {"w": np.ones(3)}, {}).version)
except StaleParent:
    print("stale")
"""


def publish(store: VersionStore, task_id: str, parent: int | None, **changes: Any) -> int:
    return store.publish(make_manifest(task_id, parent, **changes), TENSORS, SAMPLES).version


def start_trainer(
    folder: DataFolder, manifest: Manifest, die_at: str, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    storage = storage_of(folder)
    url = storage.location("").rstrip("/") if storage.shared else ""
    command = [sys.executable, "-c", TRAINER, str(storage.root), manifest.to_json().decode(), die_at, url]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def kill_and_publish_again(store: VersionStore, step: str, parent: int | None) -> None:
    """A trainer is killed at a step of publishing a task, and another one publishes it: the task has one version."""
    manifest = make_manifest("killed", parent)
    trainer = start_trainer(store.storage, manifest, step)
    assert trainer.communicate(timeout=60)[0] == ""
    assert trainer.returncode == -signal.SIGKILL
    # Before any repair, the current version loads, and the log is correct.
    assert store.current() == (store.find_task("killed") or parent)
    assert (store.log()[-1].version if store.log() else None) == store.current()
    if store.current():
        store.load()
    if step == "promoted":
        with pytest.raises(StaleParent):
            store.publish(manifest, TENSORS, SAMPLES)
    else:
        assert store.find_task("killed") is None
        store.publish(manifest, TENSORS, SAMPLES)
    assert store.load().manifest.task_id == "killed"
    assert store.find_task("killed") == store.current()
    assert [line.version for line in store.log()] == [*([parent] if parent else []), store.current()]


def race(store: VersionStore, manifests: Sequence[Manifest], environments: Sequence[Mapping[str, str]]) -> list[str]:
    """Trainers that publish at once, one per manifest, with these environments in turn; what each of them answers."""
    racers = [
        start_trainer(store.storage, manifest, "race", environments[i % len(environments)])
        for i, manifest in enumerate(manifests)
    ]
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == "ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("go\n")
        racer.stdin.flush()
    return sorted(racer.communicate(timeout=60)[0].strip() for racer in racers)


def record_reads(patch: pytest.MonkeyPatch) -> list[str]:
    """The tasks and heads that are read from now on, by their keys."""
    keys: list[str] = []
    real = LocalFiles.get

    def get(self: LocalFiles, key: str) -> bytes:
        if key.startswith(("tasks/", "heads/")):
            keys.append(key)
        return real(self, key)

    patch.setattr(LocalFiles, "get", get)
    return keys


def tree(root: Path) -> dict[str, bytes | None]:
    """The content of every file except locks; None for a folder."""
    paths = (p for p in root.rglob("*") if not p.name.endswith(".lock"))
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in paths}


def seen_by_name(root: Path, version: int | None = None) -> dict[str, list[str]]:
    """The images that a version has learned, by the present names of their classes."""
    store = VersionStore(root)
    number = version or store.current() or 0
    seen: dict[str, list[str]] = samples_by_name(store.samples(number), store.manifest(number))["seen"]
    return seen


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


def flip_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
