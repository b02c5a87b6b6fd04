"""The naive model: the networks of all tasks in torch, one after the other.

Weights, image reader and rules are those of the service, so the answers are those of its exact rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from models.images import load_pixels
from models.inference.answer import answer
from models.inference.evidence import Features
from models.inference.model_cache import ModelCache
from models.network.adapted_blocks import tensors_of
from models.network.backbone import open_backbone
from models.versions.store import VersionStore


class TorchRecogniser:
    """Answers a batch of encoded images."""

    def __init__(self, data: Path, threads: int) -> None:
        torch.set_num_threads(threads)
        loaded = ModelCache(VersionStore(data)).load()
        self._model, self._preprocessing = loaded.model, loaded.preprocessing
        self._backbone = open_backbone(data)
        self._tasks = [tensors_of(task) for task in self._model.tasks]

    @torch.inference_mode()
    def answers(self, images: Sequence[bytes]) -> list[dict[str, Any]]:
        pixels = torch.from_numpy(np.stack([load_pixels(image, self._preprocessing) for image in images]))
        tokens = self._backbone.trunk(pixels)
        tasks = [self._backbone.blocks(tokens, task).numpy() for task in self._tasks]
        features = Features(tasks, *(part.numpy() for part in self._backbone.frozen(tokens)))
        return [one.to_dict() for one in answer(self._model, self._model.evidence(features))]
