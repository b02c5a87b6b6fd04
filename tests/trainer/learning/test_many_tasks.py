"""What keeps the work of a further task small when many are learned."""

from collections import Counter
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from models.network.adapted_blocks import tensors_of
from models.network.backbone import open_backbone
from tests.support.exported import random_task
from tests.support.tiny_model import TinyImages, class_tasks, learn_tasks, tiny_learner
from trainer.learning.left_out_evidence import choose_images
from trainer.learning.memory import Samples
from trainer.learning.tokens import CHUNK, TokenCache


@pytest.mark.parametrize("count", [0, 3, CHUNK + 2])
def test_features_of_all_tasks_are_those_of_each(count: int) -> None:
    learner = tiny_learner()
    model = learn_tasks(learner, class_tasks([2, 1]))[-1].model
    keys = [key for own in TinyImages().batch(["a"], count=count or 1).values() for key in own][:count]
    every = learner.tokens.features_of_all(keys, model.tasks)
    assert every.shape == (2, count, learner.backbone.spec.dimensions)
    for own, task in zip(every, model.tasks, strict=True):
        np.testing.assert_allclose(own, learner.tokens.features(keys, tensors_of(task)), atol=1e-5)


def test_a_cnn_computes_features_of_all_tasks_as_its_blocks_do(tmp_path: Path) -> None:
    backbone = open_backbone(tmp_path, "tf_efficientnet_lite0", None, 1)
    tokens = TokenCache(backbone, lambda key: b"")
    pooled = torch.randn(CHUNK + 1, 1, backbone.spec.frozen.size, generator=torch.Generator().manual_seed(0))
    keys = [str(number) for number in range(len(pooled))]
    tasks = [random_task(backbone, 8, seed) for seed in (1, 2)]
    with patch.object(tokens, "_tokens", lambda chunk, view: torch.stack([pooled[int(key)] for key in chunk])):
        found = tokens.features_of_all(keys, tasks)
    with torch.inference_mode():
        expected = [backbone.blocks(pooled, tensors_of(task)).numpy() for task in tasks]
    np.testing.assert_allclose(found, np.stack(expected), atol=1e-3)


def test_a_calibration_with_many_classes_uses_two_images_of_each() -> None:
    """One image alone cannot be left out: a version of many classes would have nothing to calibrate on."""
    memory = {f"class {c}": [f"{c}/{n}" for n in range(3)] for c in range(300)}
    chosen = choose_images(Samples(memory), 500, np.random.default_rng(0))
    assert set(Counter(chosen.values()).values()) == {2}
    assert len(chosen) == 600
