"""Tokens: what the frozen trunk makes of an image, computed once and kept while a task is learned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.backbone import Backbone
from models.images import read_image
from models.network import TaskTensors
from trainer.augment import augment
from trainer.randomness import stream

CHUNK = 32  # images a pass: small enough for any memory, large enough to keep the cores busy
Reader = Callable[[str], bytes]


class Tokens:
    """Trunk outputs by image key and view; view 0 is the plain image, the others are augmented."""

    def __init__(self, backbone: Backbone, read: Reader, seed: int = 0, device: str = "cpu") -> None:
        self._backbone, self._read, self._seed = backbone, read, seed
        self.device = torch.device(device)
        self._kept: dict[tuple[str, int], Tensor] = {}
        backbone.trunk.to(self.device)
        backbone.blocks.to(self.device)

    def __len__(self) -> int:
        return len(self._kept)

    def prepare(self, keys: Sequence[str], views: int = 1, done: Callable[[int], None] = lambda n: None) -> None:
        """Compute what is not there yet; `done` hears of every chunk."""
        wanted = [(key, view) for key in dict.fromkeys(keys) for view in range(views)]
        missing = [item for item in wanted if item not in self._kept]
        with ThreadPoolExecutor(2) as pool:
            for start in range(0, len(missing), CHUNK):
                chunk = missing[start : start + CHUNK]
                pixels = torch.from_numpy(np.stack(list(pool.map(self._pixels, chunk))))
                with torch.inference_mode():
                    tokens = self._backbone.trunk(pixels.to(self.device)).cpu()
                # A clone each: a slice would keep its whole chunk alive, and an inference tensor cannot be trained on.
                self._kept.update({item: row.clone() for item, row in zip(chunk, tokens, strict=True)})
                done(len(chunk))

    def _pixels(self, item: tuple[str, int]) -> NDArray[np.float32]:
        key, view = item
        preprocessing = self._backbone.spec.preprocessing
        image = read_image(self._read(key), hint=preprocessing.resize)
        if view:
            image = augment(image, stream(self._seed, "view", key, view))
        return preprocessing.apply(image)

    def get(self, keys: Sequence[str], views: Sequence[int] | None = None) -> Tensor:
        """(n, P, d), on the device."""
        self.prepare(keys)
        rows = [self._kept[key, view] for key, view in zip(keys, views or [0] * len(keys), strict=True)]
        return torch.stack(rows).to(self.device)

    def features(
        self, keys: Sequence[str], task: TaskTensors, done: Callable[[int], None] = lambda n: None
    ) -> NDArray[np.float32]:
        """z under one task's network: (n, d)."""
        task = TaskTensors(*(tensor.to(self.device) for tensor in task))
        out = []
        for start in range(0, len(keys), CHUNK):
            with torch.inference_mode():
                out.append(self._backbone.blocks(self.get(keys[start : start + CHUNK]), task).cpu().numpy())
            done(len(out[-1]))
        return np.concatenate(out) if out else np.zeros((0, self._backbone.spec.dimensions), np.float32)
