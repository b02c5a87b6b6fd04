"""`python -m benchmarks.accuracy.served`: the server answers what the benchmark measures.

Learns two tasks of Caltech with `openworld learn`, serves them with `openworld serve`, and compares label and flag
of test images over HTTP with those of the benchmark's path: torch features, then the model's decisions.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.data import ImageSet
from benchmarks.accuracy.streams import LITE0, Stream
from benchmarks.serving.load import HOST, PATH
from benchmarks.serving.process import free_port, running
from benchmarks.serving.wire import raw_request
from models.inference.answer import Answer, answer
from models.inference.evidence import Features
from models.inference.stored_model import read_model
from models.network.adapted_blocks import tensors_of
from models.network.backbone import open_backbone
from models.versions.store import VersionStore
from trainer.learning.tokens import TokenCache

ROOT = Path(__file__).resolve().parents[2]
TASKS, CLASSES, PER_CLASS = 2, 5, 20
COMMAND_SECONDS = 900
# ONNX Runtime and torch round differently: images this near to a decision may be answered differently.
LEAST_AGREEMENT = 0.99


def learn(images: ImageSet, stream: Stream, work: Path, environment: Mapping[str, str]) -> Path:
    """A data folder with one version per task."""
    for number, task in enumerate(stream.tasks):
        for name, keys in task.items():
            folder = work / f"task {number}" / name
            folder.mkdir(parents=True)
            for key in keys:
                (folder / f"{key.replace('/', '-')}.jpg").write_bytes(images.read(key))
        command = [sys.executable, "-m", "openworld", "learn", str(work / f"task {number}")]
        subprocess.run([*command, "--data", str(work / "data")], env=environment, check=True, timeout=COMMAND_SECONDS)
    return work / "data"


def over_http(images: ImageSet, keys: Sequence[str], work: Path, environment: Mapping[str, str]) -> list[Any]:
    """The server's answers: (label, novel) of every image."""
    port = free_port()
    first = raw_request(f"{HOST}:{port}", PATH, images.read(keys[0]))
    variables = {**environment, "OPENWORLD_DATA": str(work / "data"), "OPENWORLD_PORT": str(port)}
    answers = []
    with running([sys.executable, "-m", "openworld", "serve"], variables, port, first, work / "serve.log", ROOT):
        connection = http.client.HTTPConnection(HOST, port, timeout=30)
        for key in keys:
            connection.request("POST", PATH, images.read(key), {"Content-Type": "image/jpeg"})
            response = connection.getresponse()
            body = json.loads(response.read())
            if response.status != 200:
                raise RuntimeError(f"the server answered {response.status}: {body}")
            prediction = body["predictions"][0]
            answers.append((prediction["label"], prediction["novel"]))
        connection.close()
    return answers


def by_torch(images: ImageSet, keys: Sequence[str], data: Path) -> list[Answer]:
    """The benchmark's path."""
    model, _ = read_model(VersionStore(data).load())
    tokens = TokenCache(open_backbone(data), images.read)
    refined = None if model.refined is None else tokens.refined(keys, model.refined.tail)
    tasks = [tokens.features(keys, tensors_of(task)) for task in model.tasks]
    features = Features(tasks, *tokens.frozen(keys), refined=refined)
    return answer(model, model.evidence(features))


def compare(served: Sequence[Any], measured: Sequence[Answer]) -> dict[str, Any]:
    pairs = list(zip(served, measured, strict=True))
    labels = [label == own.label for (label, _), own in pairs]
    flags = [novel == own.novel for (_, novel), own in pairs]
    return {
        "images": len(pairs),
        "same_label": float(np.mean(labels)),
        "same_flag": float(np.mean(flags)),
        "novel": float(np.mean([own.novel for own in measured])),
        "agree": min(np.mean(labels), np.mean(flags)) >= LEAST_AGREEMENT,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy.served", description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with caltech.safetensors")
    parser.add_argument("--images", type=int, default=300, help="test images to send (default 300)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    images = ImageSet.load(args.data / "caltech.safetensors")
    stream = Stream.make(images, TASKS, CLASSES, PER_CLASS, args.seed)
    # All images of learned classes, and as many others as it takes.
    learned = [key for key, label in zip(stream.test_keys, stream.labels, strict=True) if label >= 0]
    others = [key for key, label in zip(stream.test_keys, stream.labels, strict=True) if label < 0]
    keys = [*learned, *others][: args.images]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENWORLD_")}
    environment |= {"OPENWORLD_BACKBONE": LITE0, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory(prefix="served-") as name:
        data = learn(images, stream, Path(name), environment)
        # Before serving, which adds novel images to the inbox.
        measured = by_torch(images, keys, data)
        found = compare(over_http(images, keys, Path(name), environment), measured)
    print(json.dumps(found, indent=1, default=bool))
    return 0 if found["agree"] else 1


if __name__ == "__main__":
    sys.exit(main())
