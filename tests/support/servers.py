"""A data folder with three learned versions, and a real `openworld serve` process on it."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
from PIL import Image

from models.inference.stored_model import model_tensors
from models.versions.store import VersionStore
from tasks.images import ImageStore
from tests.support.loop_programs import Program, start_program
from tests.support.manifests import manifest_of
from tests.support.once_per_run import made_once
from tests.support.settings import clean_environment, variables
from tests.support.tiny_model import SIZE, TinyImages, class_tasks, learn_tasks, tiny_backbone, tiny_settings
from tests.support.waiting import wait_until
from trainer.learning.learner import Learner
from trainer.learning.tokens import TokenCache

IMAGES = TinyImages()


def known_image(label: str, number: int = 100) -> bytes:
    """An image of a class that `learned_folder` knows ("class 0", ...) and was not trained on."""
    return IMAGES.read(f"{label}/{number}")


def novel_image(number: int) -> bytes:
    """An image unlike every learned class: pixels at random, where they have four coloured squares."""
    pixels = np.random.default_rng(number).integers(0, 2, (SIZE, SIZE, 3), dtype=np.uint8) * 255
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def _learn_three_versions(folder: Path) -> None:
    """Three versions: classes 0 and 1, then 2 and 3, then 4; version 3 is current."""
    from models.files import write_durable
    from models.versions.backbone_spec import RECORD
    from tests.support.exported import export_once

    backbone = tiny_backbone()
    store = VersionStore(folder)
    write_durable(folder / RECORD, json.dumps(backbone.spec.to_dict()).encode())
    graphs = {role: store.add_graph(data) for role, data in export_once(backbone).items()}
    images, settings = ImageStore(folder), tiny_settings()
    batches = [
        {name: [images.put(IMAGES.read(key)) for key in keys] for name, keys in batch.items()}
        for batch in class_tasks([2, 2, 1], images=12)
    ]
    learner = Learner(TokenCache(backbone, images.read, settings.seed), settings)
    for number, learned in enumerate(learn_tasks(learner, batches)):
        manifest = manifest_of(learned.model, backbone.spec, parent=number or None, graphs=graphs)
        store.publish(manifest, model_tensors(learned.model), learned.samples.to_json())


def learned_folder(root: Path, current: int = 3) -> Path:
    """A private copy of the data folder with three versions. `CURRENT` comes last: a server may run there already."""
    source = made_once("three versions", _learn_three_versions)
    shutil.copytree(source, root, dirs_exist_ok=True, ignore=shutil.ignore_patterns("CURRENT"))
    shutil.copy(source / "CURRENT", root)
    if current != 3:
        VersionStore(root).activate(current, "operator", "for a test")
    return root


@dataclass
class RunningServer:
    """An `openworld serve` process."""

    process: subprocess.Popen[bytes] | Program
    url: str
    log: Path
    exit_code: int | None = field(default=None)

    def get(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=30, **arguments)

    def post(self, path: str, **arguments: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=30, **arguments)

    def metric(self, name: str, **labels: str) -> float:
        """The value of one series, 0 when it is absent."""
        return metric_value(self.get("/metrics").text, name, **labels)

    def log_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]

    def wait_for_version(self, version: int, seconds: float = 20) -> None:
        wait_until(lambda: self.get("/versions").json()["serving"] == version, seconds)

    def stop(self, how: int = signal.SIGTERM, seconds: float = 30) -> int:
        if self.process.poll() is None:
            self.process.send_signal(how)
        self.exit_code = self.process.wait(seconds)
        return self.exit_code


def metric_value(text: str, name: str, **labels: str) -> float:
    from prometheus_client.parser import text_string_to_metric_families

    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and sample.labels == labels:
                return float(sample.value)
    return 0.0


@contextmanager
def running_server(
    data: Path, log: Path | None = None, *, fresh: bool = False, next_release: bool = False, **settings: object
) -> Iterator[RunningServer]:
    """A server on a free port. `settings` are fields of ServiceSettings.

    It is forked from a process that has imported it. With `fresh` it has its own interpreter and inherits the limits
    of this process: for tests that measure its memory or its exit. With `next_release` it is that of
    `loop_programs.py`.
    """
    log = log or data.parent / f"{data.name}.serve.log"
    environment = clean_environment() | variables(**settings)
    environment |= {"OPENWORLD_LOG_FORMAT": "json", "OPENWORLD_PORT": "0"}
    environment.setdefault("OPENWORLD_SERVE_DRAIN_SECONDS", "0.1")
    if next_release:
        environment["NEXT_RELEASE"] = "1"
    process: subprocess.Popen[bytes] | Program
    if fresh:
        command = [sys.executable, "-m", "openworld", "serve", "--data", str(data)]
        with log.open("wb") as file:
            process = subprocess.Popen(command, stderr=file, stdout=file, env=environment)
    else:
        process = start_program("serve", data, log, environment)
    try:
        server = RunningServer(process, address_of(process, log), log)
        yield server
    finally:
        if process.poll() is None:
            process.terminate()
            killer = threading.Timer(20, process.kill)
            killer.start()
            process.wait()
            killer.cancel()


def address_of(process: subprocess.Popen[bytes] | Program, log: Path, seconds: float = 60) -> str:
    """The address that the server's log reports."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for line in log.read_text(errors="replace").splitlines():
            if "listening on http://" in line:
                return str(json.loads(line)["message"].rpartition(" ")[2])
        assert process.poll() is None, f"the server ended with {process.returncode}:\n{log.read_text()}"
        time.sleep(0.05)
    raise AssertionError(f"the server did not start:\n{log.read_text()}")
