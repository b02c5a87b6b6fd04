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
        self._tasks = [tensors_of(task) for task in self._model.tasks] if self._model.rule.uses_networks else []
        self._tail, refined = self._backbone.tail, self._model.refined
        self._refined: list[torch.Tensor] | None = None  # the adapters of the tail, if the version weighs it
        if self._tail is not None and refined is not None and self._model.uses_refined:
            self._refined = [torch.from_numpy(refined.tail[name]) for name in self._tail.names]

    @torch.inference_mode()
    def answers(self, images: Sequence[bytes]) -> list[dict[str, Any]]:
        pixels = torch.from_numpy(np.stack([load_pixels(image, self._preprocessing) for image in images]))
        trunk: Any = self._backbone.trunk
        refined = None
        if self._tail is None or self._refined is None:
            tokens = trunk(pixels)
        else:
            tokens, maps = trunk.with_map(pixels)
            refined = self._tail(maps, *self._refined).numpy()
        tasks = [self._backbone.blocks(tokens, task).numpy() for task in self._tasks]
        frozen, expanded = (part.numpy() for part in self._backbone.frozen(tokens))
        features = Features(tasks, frozen, expanded, refined=refined)
        return [one.to_dict() for one in answer(self._model, self._model.evidence(features))]
