"""Tokens: what the frozen trunk makes of an image, computed once and kept while a task is learned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.images import load_pixels, read_image
from models.network.adapted_blocks import TaskTensors
from models.network.backbone import Backbone
from trainer.learning.augmentation import augment
from trainer.learning.reproducibility import random_stream

CHUNK = 32  # images a pass: small enough for any memory, large enough to keep the cores busy
KEPT_BYTES = 4 * 2**30
Reader = Callable[[str], bytes]
Item = tuple[str, int]  # key and view


class Tokens:
    """Trunk outputs by image key and view; view 0 is the plain image, the others are augmented.

    At most `limit` bytes are kept; what does not fit is computed each time that it is asked for: slower, never wrong.
    """

    def __init__(
        self, backbone: Backbone, read: Reader, seed: int = 0, device: str = "cpu", limit: int = KEPT_BYTES
    ) -> None:
        self._backbone, self._read, self._seed = backbone, read, seed
        self.device = torch.device(device)
        self._kept: dict[Item, Tensor] = {}
        self._room = limit
        backbone.trunk.to(self.device)
        backbone.blocks.to(self.device)

    def prepare(self, keys: Sequence[str], views: int = 1, done: Callable[[int], None] = lambda n: None) -> None:
        """Compute what is not there yet, as far as there is room; `done` hears of every chunk."""
        wanted = [(key, view) for key in dict.fromkeys(keys) for view in range(views)]
        missing = [item for item in wanted if item not in self._kept]
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            if self._room > 0:
                self._fetch(chunk)
            done(len(chunk))

    def _fetch(self, items: Sequence[Item]) -> dict[Item, Tensor]:
        """The tokens of all the items; new ones are kept while there is room."""
        found = {item: self._kept[item] for item in items if item in self._kept}
        for chunk, tokens in self._compute([item for item in dict.fromkeys(items) if item not in found]):
            for item, row in zip(chunk, tokens, strict=True):
                found[item] = row.clone()  # a slice would keep its whole chunk alive
                if row.nbytes <= self._room:
                    self._room -= row.nbytes
                    self._kept[item] = found[item]
                else:
                    self._room = 0  # full: no later chunk tries again
        return found

    def _compute(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Tensor]]:
        with ThreadPoolExecutor(2) as pool:
            for start in range(0, len(items), CHUNK):
                chunk = items[start : start + CHUNK]
                pixels = torch.from_numpy(np.stack(list(pool.map(self._pixels, chunk))))
                with torch.no_grad():
                    yield chunk, self._backbone.trunk(pixels.to(self.device)).cpu()

    def _pixels(self, item: Item) -> NDArray[np.float32]:
        key, view = item
        preprocessing = self._backbone.spec.preprocessing
        if view == 0:
            return load_pixels(self._read(key), preprocessing)
        # An augmented view is a crop of the image: it needs more pixels than the plain one.
        image = read_image(self._read(key), hint=preprocessing.resize * 5 // 4)
        return preprocessing.apply(augment(image, random_stream(self._seed, "view", key, view)))

    def get(self, keys: Sequence[str], views: Sequence[int] | None = None) -> Tensor:
        """(n, P, d), on the device."""
        items = list(zip(keys, views or [0] * len(keys), strict=True))
        found = self._fetch(items)
        return torch.stack([found[item] for item in items]).to(self.device)

    def features(self, keys: Sequence[str], task: TaskTensors) -> NDArray[np.float32]:
        """z under one task's network: (n, d)."""
        task = TaskTensors(*(tensor.to(self.device) for tensor in task))
        out = [np.zeros((0, self._backbone.spec.dimensions), np.float32)]
        for start in range(0, len(keys), CHUNK):
            tokens = self.get(keys[start : start + CHUNK])
            with torch.inference_mode():
                out.append(self._backbone.blocks(tokens, task).cpu().numpy())
        return np.concatenate(out)
