"""Images of the Dockerfile that buildah has built, and programs that run in them, isolated by chroot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.paths import ROOT
from tests.support.waiting import wait_until

STORE = Path(os.environ.get("IMAGES", ROOT / ".images")).absolute()
TAG = os.environ.get("IMAGE_TAG", "local")
USER = 10001  # of the Dockerfile
# Reasons of this machine, not of the Dockerfile: no Debian mirror, no package index, no right to use chroot and mount.
CANNOT_BUILD = ("the base image was not made", "No matching distribution", "name resolution", "not permitted")


def _buildah(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["buildah", "--root", str(STORE / "storage"), "--runroot", str(STORE / "run"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def _checked(*arguments: str) -> str:
    done = _buildah(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@cache
def image(target: str) -> dict[str, Any]:
    """The configuration of an image. That of the server is built here; that of the trainer has 6 GB and must exist."""
    if shutil.which("buildah") is None:
        pytest.skip("buildah is not installed")
    if os.geteuid() != 0:
        pytest.skip("images are built as root")
    if target == "server":
        _build(target)
    if not STORE.exists() or (found := _buildah("inspect", "--type", "image", _name(target))).returncode:
        pytest.skip(f'there is no image "{target}": run `sh deploy/images.sh {target}`, or `make images`')
    config: dict[str, Any] = json.loads(found.stdout)["Docker"]["config"]
    return config


def _build(target: str) -> None:
    if "BASE" not in os.environ and shutil.which("mmdebstrap") is None:
        pytest.skip("mmdebstrap is not installed")
    done = subprocess.run(
        ["sh", ROOT / "deploy" / "images.sh", target], capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode and any(reason in done.stderr for reason in CANNOT_BUILD):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr


def _name(target: str) -> str:
    return f"localhost/openworld-{target}:{TAG}"


@dataclass(frozen=True)
class Running:
    """The program of an image, as its process on this machine."""

    process: psutil.Process
    runner: subprocess.Popen[bytes]
    root: Path
    before: set[Path]
    log: Path

    def stop(self) -> int:
        """Send the signal that an engine sends; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.runner.wait(60)

    def written_files(self) -> set[Path]:
        """What was added to the container's files, except in the folder for temporary files."""
        return {path for path in _files(self.root) - self.before if path.parts[0] != "tmp"}


def _files(root: Path) -> set[Path]:
    return {path.relative_to(root) for path in root.rglob("*")}


@contextmanager
def running(target: str, data: Path, log: Path, settings: Mapping[str, object]) -> Iterator[Running]:
    """Run an image's command in a new container, on the network of this machine and with `data` as /data."""
    config = image(target)
    container = _checked("from", "--pull-never", _name(target))
    try:
        # A volume of the image would hide the folder that is mounted.
        _checked("config", "--volume", "/data-", container)
        root = Path(_checked("mount", container))
        before = _files(root)
        options = [word for name, value in settings.items() for word in ("--env", f"{name}={value}")]
        command = [*config["Entrypoint"], *config["Cmd"]]
        with log.open("wb") as file:
            runner = subprocess.Popen(
                ["buildah", "--root", STORE / "storage", "--runroot", STORE / "run", "run", "--isolation", "chroot",
                 "--network", "host", "--volume", f"{data}:/data", *options, container, "--", *command],
                stdout=file, stderr=file,
            )  # fmt: skip
        try:
            yield Running(_program(runner, log), runner, root, before, log)
        finally:
            for child in psutil.Process(runner.pid).children(recursive=True) if runner.poll() is None else []:
                child.kill()
            runner.kill()
            runner.wait(30)
    finally:
        _buildah("umount", container)
        _checked("rm", container)


def _program(runner: subprocess.Popen[bytes], log: Path) -> psutil.Process:
    """The interpreter below the processes of buildah."""
    found: list[psutil.Process] = []

    def started() -> bool:
        assert runner.poll() is None, log.read_text()
        found.extend(filter(_is_python, psutil.Process(runner.pid).children(recursive=True)))
        return bool(found)

    wait_until(started, 60)
    return found[0]


def _is_python(process: psutil.Process) -> bool:
    try:
        return Path(process.exe()).name.startswith("python")
    except psutil.Error:  # it has ended
        return False
