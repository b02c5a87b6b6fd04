"""`product-v1`: what the product served before its decisions were fitted, run with the code of that checkout.

This file is also the program that runs there: `python product_v1.py JOB`, with PYTHONPATH set to the checkout. It then
imports the checkout's packages, and nothing of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from benchmarks.accuracy.metrics import Step
    from benchmarks.accuracy.streams import Stream
    from trainer.learning.tokens import TokenCache

ABOUT = {"product-v1": "the product as of commit e6c0161, with its own code and default settings"}
SECONDS = 6 * 3600


def run(checkout: Path, data: Path, stream: Stream, tokens: TokenCache, job: dict[str, Any]) -> dict[str, list[Step]]:
    """The steps of the old product; `job` holds backbone, weights, adapted_blocks, seed and threads."""
    from benchmarks.accuracy.metrics import Step

    part = tokens.backbone.spec.frozen.parts[0]
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        if part.name == "pooled":
            # The old trunk of a CNN is the pooled feature: pass it on instead of computing it again.
            keys = sorted({*stream.test_keys, *(key for task in stream.tasks for own in task.values() for key in own)})
            rows = [tokens.get(keys[start : start + 512])[:, 0, : part.size] for start in range(0, len(keys), 512)]
            np.savez(work / "tokens.npz", keys=np.array(keys), rows=np.concatenate([row.numpy() for row in rows]))
        job = {
            **job,
            "data": str(data.resolve()),
            "work": str(work),
            "tasks": stream.tasks,
            "test_keys": stream.test_keys,
        }
        (work / "job.json").write_text(json.dumps(job))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENWORLD_")}
        # -P: this file's folder is not a place to import from.
        subprocess.run(
            [sys.executable, "-P", str(Path(__file__).resolve()), str(work / "job.json")],
            cwd=checkout,
            env={**environment, "PYTHONPATH": str(checkout.resolve())},
            check=True,
            timeout=SECONDS,
        )
        with np.load(work / "out.npz") as out:
            found = {key: out[key] for key in out.files}
    steps = []
    for k in range(len(stream.tasks)):
        column = {name: c for c, name in enumerate(found[f"classes_{k}"].tolist())}
        order = [column[name] for name in stream.classes[: len(column)]]
        steps.append(
            Step(
                found[f"scores_{k}"][:, order],
                found[f"tasks_{k}"][order],
                found[f"novelty_{k}"],
                found[f"flagged_{k}"],
                found[f"p_novel_{k}"],
                seconds=float(found["seconds"][k]),
            )
        )
    return {"product-v1": steps}


def _main(job: dict[str, Any]) -> None:
    """Run in the old checkout; its modules differ from those that are type-checked here."""
    import torch

    from benchmarks.accuracy.data import ImageSet
    from models.inference.answer import answer
    from models.inference.evidence import Features
    from models.network.adapted_blocks import tensors_of
    from models.network.backbone import open_backbone
    from trainer.learning.checkpoint import Checkpoint
    from trainer.learning.learner import Learner
    from trainer.learning.memory import Samples
    from trainer.learning.progress import Progress
    from trainer.learning.reproducibility import configure_torch
    from trainer.learning.settings import LearnerSettings
    from trainer.learning.tokens import TokenCache

    work, test_keys = Path(job["work"]), job["test_keys"]
    settings = LearnerSettings(seed=job["seed"], threads=job["threads"])
    configure_torch(settings)
    weights = Path(job["weights"]) if job["weights"] else None
    backbone: Any = open_backbone(work / "folder", job["backbone"], weights, job["adapted_blocks"])
    tokens = TokenCache(backbone, ImageSet.load(Path(job["data"])).read, settings.seed)
    if (work / "tokens.npz").is_file():
        with np.load(work / "tokens.npz") as given:
            pairs = zip(given["keys"].tolist(), torch.from_numpy(given["rows"]), strict=True)
            tokens._cache |= {(key, 0): row[None] for key, row in pairs}
    learner = Learner(tokens, settings)
    model: Any = learner.empty()
    samples, features, seconds = Samples(), [], []
    make_features: Any = Features
    frozen = tokens.features(test_keys, backbone.frozen_task())
    out: dict[str, Any] = {}
    for k, task in enumerate(job["tasks"]):
        started = time.monotonic()
        learned = learner.learn(model, samples, task, Checkpoint(None), Progress(str(k), lambda event: None))
        seconds.append(time.monotonic() - started)
        model, samples = learned.model, learned.samples
        features.append(tokens.features(test_keys, tensors_of(model.tasks[-1])))
        evidence = model.evidence(make_features(features, frozen))
        answers = answer(model, evidence)
        out[f"scores_{k}"] = model.rule.log_scores(evidence)
        out[f"classes_{k}"] = np.array(model.classes)
        out[f"tasks_{k}"] = model.task_of_class
        out[f"novelty_{k}"] = np.array([entry.score for entry in answers])
        out[f"flagged_{k}"] = np.array([entry.novel for entry in answers])
        out[f"p_novel_{k}"] = np.array([entry.p_novel for entry in answers])
    np.savez(work / "out.npz", seconds=np.array(seconds), **out)


if __name__ == "__main__":
    _main(json.loads(Path(sys.argv[1]).read_text()))
