"""The Kubernetes manifests: the files of the base, and what `kubectl kustomize` makes of an overlay."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (FOLDER / "overlays").iterdir())
Manifest = dict[str, Any]


def files() -> list[Path]:
    """The files with resources, without those of kustomize."""
    found = sorted(path for name in ("base", "monitoring") for path in (FOLDER / name).glob("*.yaml"))
    return [path for path in found if path.name != "kustomization.yaml"]


@cache
def resources(overlay: str | None = None) -> list[Manifest]:
    """All resources of an overlay; None: as the files have them. Skips an overlay without kubectl."""
    if overlay is None:
        return [one for path in files() for one in yaml.safe_load_all(path.read_text())]
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: only the base is tested")
    command = ["kubectl", "kustomize", str(FOLDER / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(kind: str, name: str, overlay: str | None = None) -> Manifest:
    (found,) = [m for m in resources(overlay) if (m["kind"], m["metadata"]["name"]) == (kind, name)]
    return found


def pods(overlay: str | None = None) -> dict[str, Manifest]:
    """The pod templates, by the name of what starts them."""
    kinds = ("Deployment", "StatefulSet", "DaemonSet", "Job", "CronJob")
    return {m["metadata"]["name"]: m["spec"]["template"] for m in resources(overlay) if m["kind"] in kinds}


def containers(overlay: str | None = None) -> Iterator[tuple[str, Manifest]]:
    for name, pod in pods(overlay).items():
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            yield name, container


def environment(container: Manifest) -> dict[str, Any]:
    """Variable -> value, None where a secret or a field gives it."""
    return {entry["name"]: entry.get("value") for entry in container["env"]}
