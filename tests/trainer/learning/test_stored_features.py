"""Features on disk: a later task reads and computes only its own images, and learns the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from models.files import sha256_bytes
from models.inference.runtime import Runtime
from models.inference.stored_model import model_tensors
from tasks.images import FeatureCache, cache_files
from tests.support.exported import export_once
from tests.support.tiny_model import TinyImages, silent_progress, tiny_backbone, tiny_settings
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.forward_passes import CHUNK
from trainer.learning.learner import Learned, Learner
from trainer.learning.memory import Samples
from trainer.learning.tokens import TokenCache

IMAGES = {f"class {c}": [TinyImages().read(f"class {c}/{n}") for n in range(12)] for c in range(6)}
KEYS = {name: [sha256_bytes(data) for data in own] for name, own in IMAGES.items()}
DATA = {sha256_bytes(data): data for own in IMAGES.values() for data in own}
TASKS = [{f"class {c}": KEYS[f"class {c}"] for c in (first, first + 1)} for first in (0, 2, 4)]
SETTINGS = tiny_settings(replay_size=None, keep_per_class=8)


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime(export_once(tiny_backbone()), "cpu", 1)


class Reads:
    def __init__(self) -> None:
        self.count: Counter[str] = Counter()

    def __call__(self, key: str) -> bytes:
        self.count[key] += 1
        return DATA[key]


def learn(
    folder: Path, runtime: Runtime | None, limit: int = 10**8, between: Callable[[int], None] = lambda task: None
) -> tuple[list[Learned], list[Counter[str]]]:
    """Learn all tasks, each in a new process: only the disk is kept. Returns the results and the reads of each."""
    learned: list[Learned] = []
    reads: list[Counter[str]] = []
    for number, task in enumerate(TASKS):
        between(number)
        read, backbone = Reads(), tiny_backbone()
        stored = FeatureCache(folder, backbone.spec.sha256, DATA, limit)
        learner = Learner(TokenCache(backbone, read, stored=stored, runtime=runtime), SETTINGS)
        model, samples = (learned[-1].model, learned[-1].samples) if learned else (learner.empty(), Samples())
        learned.append(learner.learn(model, samples, task, Checkpoint(None), silent_progress()))
        reads.append(read.count)
    return learned, reads


def assert_equal(one: list[Learned], other: list[Learned]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        tensors, expected = model_tensors(mine.model), model_tensors(theirs.model)
        assert all(np.array_equal(tensors[name], expected[name]) for name in expected)
        assert mine.samples == theirs.samples


@pytest.mark.parametrize("with_runtime", [False, True], ids=["torch", "onnx"])
def test_a_later_task_reads_only_its_own_images_and_learns_the_same_bytes(
    tmp_path: Path, with_runtime: bool, runtime: Runtime
) -> None:
    chosen = runtime if with_runtime else None
    cached, reads = learn(tmp_path / "on", chosen)
    plain, all_reads = learn(tmp_path / "off", chosen, limit=0)
    for task, count in zip(TASKS, reads, strict=True):
        assert dict(count) == {key: 1 for keys in task.values() for key in keys}
    assert len(all_reads[-1]) > len(reads[-1])
    assert_equal(cached, plain)


def test_damaged_evicted_and_torn_entries_are_computed_again(tmp_path: Path, runtime: Runtime) -> None:
    def damage(task: int) -> None:
        for number, file in enumerate(sorted(cache_files(tmp_path / "damaged"))):
            data = file.path.read_bytes()
            if number % 4 == 0:
                file.path.unlink()
            elif number % 4 == 1:
                file.path.write_bytes(data[: len(data) * 2 // 3])
            elif number % 4 == 2:
                file.path.write_bytes(data[:100] + bytes([data[100] ^ 255]) + data[101:])

    damaged, reads = learn(tmp_path / "damaged", runtime, between=damage)
    whole, _ = learn(tmp_path / "whole", runtime)
    assert len(reads[1]) > len(DATA) // 3
    assert_equal(damaged, whole)


def test_a_small_cache_keeps_what_fits(tmp_path: Path, runtime: Runtime) -> None:
    limit = 20_000
    small, _ = learn(tmp_path / "small", runtime, limit)
    large, _ = learn(tmp_path / "large", runtime)
    assert 0 < sum(file.bytes for file in cache_files(tmp_path / "small")) <= limit
    assert_equal(small, large)


def test_an_image_has_the_same_features_whichever_images_are_computed_with_it(runtime: Runtime) -> None:
    keys = list(DATA)
    for chosen in (None, runtime):
        tokens = [TokenCache(tiny_backbone(), DATA.__getitem__, runtime=chosen) for _ in range(2)]
        together, alone = tokens[0].frozen(keys)[0], np.concatenate([tokens[1].frozen([key])[0] for key in keys])
        assert len(keys) > CHUNK
        assert np.array_equal(together, alone)
