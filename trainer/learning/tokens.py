"""Tokens and features of images, computed once: cached in memory while a task is learned, and on disk for later tasks.

Neither the trunk nor the network of a finished task ever changes, so only new images are read and computed. Nothing
here needs a gradient: on a CPU, ONNX Runtime computes it in a fraction of the time of torch.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

from models.images import load_pixels, read_image
from models.inference.gaussians import Gaussians
from models.inference.model import Adapters, Head, TaskModel
from models.inference.runtime import Runtime
from models.network.adapted_blocks import TaskTensors
from models.network.backbone import Backbone
from tasks.images import FeatureCache
from trainer.learning.reproducibility import random_stream

# Images per forward pass. Passes are padded to it where the last bits of a product depend on the number of its rows: an
# image has the same features whichever images are computed with it, so a resumed task gives the same bytes.
CHUNK = 32
CACHE_BYTES = 4 * 2**30
MIN_CROP_AREA = 0.8
ASPECT = (0.9, 1.1)
JITTER = 0.15
Reader = Callable[[str], bytes]  # by image key
Item = tuple[str, int]  # image key and view


class TokenCache:
    """Trunk outputs by image key and view. View 0 is the plain image, the others are augmented.

    Tokens beyond `max_bytes` are not cached in memory but computed at every use. `stored` keeps those of plain images,
    and features, for later tasks. `runtime` computes in place of torch.
    """

    def __init__(
        self,
        backbone: Backbone,
        read: Reader,
        seed: int = 0,
        device: str = "cpu",
        max_bytes: int = CACHE_BYTES,
        stored: FeatureCache | None = None,
        runtime: Runtime | None = None,
    ) -> None:
        self.backbone, self._read, self._seed = backbone, read, seed
        self.device = torch.device(device)
        self._cache: dict[Item, Tensor] = {}
        self._free_bytes = max_bytes
        self._stored, self._runtime = stored, runtime
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

    def features(self, keys: Sequence[str], task: TaskTensors, *, store: bool = True) -> NDArray[np.float32]:
        """z under one finished task's network: (n, d); without `store`, later tasks compute it again."""

        def compute(tokens: Tensor) -> NDArray[np.float32]:
            if self._runtime is not None:
                return self._runtime.task_features(tokens.numpy(), _task_model(task))
            on_device = TaskTensors(*(tensor.to(self.device) for tensor in task))
            with torch.inference_mode():
                out: NDArray[np.float32] = self.backbone.blocks(tokens.to(self.device), on_device).cpu().numpy()
                return out

        return self._feature_rows(keys, f"task {_sha256(task)}", self.backbone.spec.dimensions, compute, store)

    def frozen(self, keys: Sequence[str]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The frozen feature (n, f) and its random features (n, M)."""
        spec = self.backbone.spec.frozen

        def compute(tokens: Tensor) -> NDArray[np.float32]:
            if self._runtime is not None:
                return np.concatenate(self._runtime.frozen_features(tokens.numpy()), axis=1)
            with torch.inference_mode():
                return torch.cat(self.backbone.frozen(tokens.to(self.device)), dim=1).cpu().numpy()

        rows = self._feature_rows(keys, "frozen", spec.size + spec.expanded, compute)
        return np.ascontiguousarray(rows[:, : spec.size]), np.ascontiguousarray(rows[:, spec.size :])

    def _feature_rows(
        self,
        keys: Sequence[str],
        kind: str,
        size: int,
        compute: Callable[[Tensor], NDArray[np.float32]],
        store: bool = True,
    ) -> NDArray[np.float32]:
        """One row per image: (n, size), stored ones or computed from tokens."""
        out = np.empty((len(keys), size), np.float32)
        missing: dict[str, list[int]] = {}  # image key -> its places
        for place, key in enumerate(keys):
            found = self._stored.get(key, kind) if self._stored is not None else None
            if found is not None and found.shape == (1, size):
                out[place] = found[0]
            else:
                missing.setdefault(key, []).append(place)
        names = list(missing)
        for start in range(0, len(names), CHUNK):
            chunk = names[start : start + CHUNK]
            rows = compute(_padded(self._tokens(chunk)))[: len(chunk)]
            for key, row in zip(chunk, rows, strict=True):
                out[missing[key]] = row
            if self._stored is not None and store:
                self._stored.put(kind, {key: row[None] for key, row in zip(chunk, rows, strict=True)})
        return out

    def _tokens(self, keys: Sequence[str]) -> Tensor:
        """Of plain images, in main memory."""
        found = self._fetch([(key, 0) for key in keys])
        return torch.stack([found[key, 0] for key in keys])

    def _fetch(self, items: Sequence[Item]) -> dict[Item, Tensor]:
        found = {item: self._cache[item] for item in items if item in self._cache}
        for item in items:
            if item not in found and (stored := self._stored_tokens(item)) is not None:
                found[item] = self._cache[item] = stored  # mapped: it needs no memory of its own
        for chunk, tokens in self._compute([item for item in dict.fromkeys(items) if item not in found]):
            for item, row in zip(chunk, tokens, strict=True):
                found[item] = row.clone()  # a slice would keep the whole chunk in memory
                if row.nbytes <= self._free_bytes:
                    self._free_bytes -= row.nbytes
                    self._cache[item] = found[item]
                else:
                    self._free_bytes = 0  # full: later chunks are not cached
            if self._stored is not None:
                plain = {key: found[key, view].numpy() for key, view in chunk if view == 0}
                self._stored.put("tokens", plain)
        return found

    def _stored_tokens(self, item: Item) -> Tensor | None:
        key, view = item
        stored = self._stored.get(key, "tokens") if self._stored is not None and view == 0 else None
        return None if stored is None else torch.from_numpy(stored)

    def _compute(self, items: Sequence[Item]) -> Iterator[tuple[Sequence[Item], Tensor]]:
        with ThreadPoolExecutor(2) as pool:
            for start in range(0, len(items), CHUNK):
                chunk = items[start : start + CHUNK]
                pixels = torch.from_numpy(np.stack(list(pool.map(self._pixels, chunk))))
                yield chunk, self._trunk(pixels)[: len(chunk)]

    def _trunk(self, pixels: Tensor) -> Tensor:
        if self.backbone.spec.is_transformer:  # the convolutions of a CNN compute each image alone
            pixels = _padded(pixels)
        if self._runtime is not None:
            return torch.from_numpy(self._runtime.tokens(pixels.numpy()))
        # On a CPU, the depthwise convolutions of a CNN take two thirds of the time with channels last.
        pixels = pixels.to(self.device, memory_format=torch.channels_last)
        with torch.no_grad():
            out: Tensor = self.backbone.trunk(pixels).cpu()
            return out

    def _pixels(self, item: Item) -> NDArray[np.float32]:
        key, view = item
        preprocessing = self.backbone.spec.preprocessing
        if view == 0:
            return load_pixels(self._read(key), preprocessing)
        # A view is a crop: decode it larger than the plain image.
        image = read_image(self._read(key), hint=preprocessing.resize * 5 // 4)
        return preprocessing.apply(augment(image, random_stream(self._seed, "view", key, view)))


def _padded(rows: Tensor) -> Tensor:
    """A whole chunk."""
    extra = CHUNK - len(rows)
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])]) if extra else rows


def _sha256(task: TaskTensors) -> str:
    """Of the tensors that a task's features depend on."""
    digest = hashlib.sha256()
    for tensor in task:
        digest.update(str(tuple(tensor.shape)).encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _task_model(task: TaskTensors) -> TaskModel:
    """The part of a task that computes its features."""
    w1, b1, w2, b2, norm_w, norm_b = (tensor.contiguous().numpy() for tensor in task)
    head = Head(np.zeros((0, 0), np.float32), np.zeros(0, np.float32))
    none = np.zeros((0, 0))
    gaussians = Gaussians(none, np.zeros(0, np.int64), none, np.zeros(0))
    return TaskModel((), Adapters(w1, b1, w2, b2), norm_w, norm_b, head, gaussians)


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
