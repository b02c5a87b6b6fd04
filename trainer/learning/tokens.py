"""Tokens: the frozen trunk's output for an image, computed once and cached while a task is learned."""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

from models.images import load_pixels, read_image
from models.network.adapted_blocks import TaskTensors
from models.network.backbone import Backbone
from trainer.learning.reproducibility import random_stream

CHUNK = 32  # images per forward pass
CACHE_BYTES = 4 * 2**30
MIN_CROP_AREA = 0.8
ASPECT = (0.9, 1.1)
JITTER = 0.15
Reader = Callable[[str], bytes]  # by image key
Item = tuple[str, int]  # image key and view


class TokenCache:
    """Trunk outputs by image key and view. View 0 is the plain image, the others are augmented.

    Tokens beyond `max_bytes` are not cached but computed at every use.
    """

    def __init__(
        self, backbone: Backbone, read: Reader, seed: int = 0, device: str = "cpu", max_bytes: int = CACHE_BYTES
    ) -> None:
        self.backbone, self._read, self._seed = backbone, read, seed
        self.device = torch.device(device)
        self._cache: dict[Item, Tensor] = {}
        self._free_bytes = max_bytes
        backbone.trunk.to(self.device)
        backbone.blocks.to(self.device)
        backbone.frozen.to(self.device)

    def prepare(self, keys: Sequence[str], views: int = 1, on_done: Callable[[int], None] = lambda n: None) -> None:
        """Fill the cache as far as it has room; `on_done` gets the number of images of every finished chunk."""
        wanted = [(key, view) for key in dict.fromkeys(keys) for view in range(views)]
        missing = [item for item in wanted if item not in self._cache]
        for start in range(0, len(missing), CHUNK):
            chunk = missing[start : start + CHUNK]
            if self._free_bytes > 0:
                self._fetch(chunk)
            on_done(len(chunk))

    def get(self, keys: Sequence[str], views: Sequence[int] | None = None) -> Tensor:
        """(n, P, d), for a CNN (n, 1, f), on the device."""
        items = list(zip(keys, views or [0] * len(keys), strict=True))
        found = self._fetch(items)
        return torch.stack([found[item] for item in items]).to(self.device)

    def features(self, keys: Sequence[str], task: TaskTensors) -> NDArray[np.float32]:
        """z under one task's network: (n, d)."""
        task = TaskTensors(*(tensor.to(self.device) for tensor in task))
        out = [np.zeros((0, self.backbone.spec.dimensions), np.float32)]
        for start in range(0, len(keys), CHUNK):
            tokens = self.get(keys[start : start + CHUNK])
            with torch.inference_mode():
                out.append(self.backbone.blocks(tokens, task).cpu().numpy())
        return np.concatenate(out)

    def frozen(self, keys: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The frozen feature (n, f) and its random features (n, M)."""
        spec = self.backbone.spec.frozen
        features, expanded = [np.zeros((0, spec.size), np.float32)], [np.zeros((0, spec.expanded), np.float32)]
        for start in range(0, len(keys), CHUNK):
            tokens = self.get(keys[start : start + CHUNK])
            with torch.inference_mode():
                outputs = self.backbone.frozen(tokens)
            for chunks, output in zip((features, expanded), outputs, strict=True):
                chunks.append(output.cpu().numpy())
        return np.concatenate(features), np.concatenate(expanded)

    def _fetch(self, items: Sequence[Item]) -> dict[Item, Tensor]:
        found = {item: self._cache[item] for item in items if item in self._cache}
        for chunk, tokens in self._compute([item for item in dict.fromkeys(items) if item not in found]):
            for item, row in zip(chunk, tokens, strict=True):
                found[item] = row.clone()  # a slice would keep the whole chunk in memory
                if row.nbytes <= self._free_bytes:
                    self._free_bytes -= row.nbytes
                    self._cache[item] = found[item]
                else:
                    self._free_bytes = 0  # full: later chunks are not cached
        return found

    def _compute(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Tensor]]:
        with ThreadPoolExecutor(2) as pool:
            for start in range(0, len(items), CHUNK):
                chunk = items[start : start + CHUNK]
                pixels = torch.from_numpy(np.stack(list(pool.map(self._pixels, chunk))))
                # On a CPU, the depthwise convolutions of a CNN take two thirds of the time with channels last.
                pixels = pixels.to(self.device, memory_format=torch.channels_last)
                with torch.no_grad():
                    yield chunk, self.backbone.trunk(pixels).cpu()

    def _pixels(self, item: Item) -> NDArray[np.float32]:
        key, view = item
        preprocessing = self.backbone.spec.preprocessing
        if view == 0:
            return load_pixels(self._read(key), preprocessing)
        # A view is a crop: decode it larger than the plain image.
        image = read_image(self._read(key), hint=preprocessing.resize * 5 // 4)
        return preprocessing.apply(augment(image, random_stream(self._seed, "view", key, view)))


def augment(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A random crop of at least 80 % of the area, mirrored half of the time, with jittered brightness and contrast.

    The aspect ratio is relative to the image's own: a near-square crop of a long image would lose most of its area.
    """
    area = rng.uniform(MIN_CROP_AREA, 1.0)
    aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
    across, down = rng.random(2)
    mirrored = rng.random() < 0.5
    brightness, contrast = rng.uniform(1 - JITTER, 1 + JITTER, size=2)

    width = max(1, round(image.width * min(1.0, math.sqrt(area * aspect))))
    height = max(1, round(image.height * min(1.0, math.sqrt(area / aspect))))
    left, top = round(across * (image.width - width)), round(down * (image.height - height))
    image = image.crop((left, top, left + width, top + height))
    if mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Brightness(image).enhance(float(brightness))
    return ImageEnhance.Contrast(image).enhance(float(contrast))
