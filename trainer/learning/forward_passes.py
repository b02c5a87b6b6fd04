"""The passes through the backbone that need no gradient, a chunk of images at a time.

On a CPU, ONNX Runtime computes them in a fraction of the time of torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance
from torch import Tensor

from models.images import load_pixels, read_image
from models.inference.gaussians import Gaussians
from models.inference.model import Adapters, Head, TaskModel
from models.inference.rotations import turn
from models.inference.runtime import Runtime
from models.network.adapted_blocks import TaskTensors
from models.network.backbone import Backbone
from trainer.learning.reproducibility import random_stream

# Images per forward pass. Passes are padded to it where the last bits of a product depend on the number of its rows: an
# image has the same features whichever images are computed with it, so a resumed task gives the same bytes.
CHUNK = 32
MIN_CROP_AREA = 0.8
ASPECT = (0.9, 1.1)
JITTER = 0.15
Reader = Callable[[str], bytes]  # by image key
Item = tuple[str, int]  # image key and view
MAX_VIEWS = 8  # of an upright image; larger numbers are turned views


class ForwardPasses:
    """The passes of one backbone. View 0 of an image is the plain one, the others are augmented (`turned_view`)."""

    def __init__(self, backbone: Backbone, seed: int = 0, device: str = "cpu", runtime: Runtime | None = None) -> None:
        """`runtime` computes in place of torch."""
        self.backbone, self._seed, self._runtime = backbone, seed, runtime
        self.device = torch.device(device)
        backbone.trunk.to(self.device)
        backbone.blocks.to(self.device)
        backbone.frozen.to(self.device)
        if backbone.tail is not None:
            backbone.tail.to(self.device)

    def tokens(self, items: Sequence[Item], read: Reader) -> Tensor:
        """The trunk's output for at most a chunk of images: (n, P, d), for a CNN (n, 1, f), in main memory."""
        return self._trunk(self._all_pixels(items, read))[: len(items)]

    def maps(self, keys: Sequence[str], read: Reader) -> Tensor:
        """What a CNN's tail starts from, for at most a chunk of images: (n, c, h, w), in main memory."""
        pixels = self._all_pixels([(key, 0) for key in keys], read)
        if self._runtime is not None:
            return torch.from_numpy(self._runtime.maps(pixels.numpy()))
        trunk: Any = self.backbone.trunk
        with torch.no_grad():
            out: Tensor = trunk.with_map(pixels.to(self.device, memory_format=torch.channels_last))[1].cpu()
            return out

    def refined_features(self, maps: Tensor, tail: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
        """The outputs of the tail with these adapters: (n, r)."""
        if self._runtime is not None:
            return self._runtime.refined_features(maps.numpy(), tail)
        cut = self.backbone.tail
        if cut is None:
            raise ValueError("the backbone has no tail to refine")
        with torch.inference_mode():
            on_device = [torch.tensor(tail[name], device=self.device) for name in cut.names]
            out: NDArray[np.float32] = cut(maps.to(self.device), *on_device).cpu().numpy()
            return out

    def _all_pixels(self, items: Sequence[Item], read: Reader) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return torch.from_numpy(np.stack(list(pool.map(lambda item: self._pixels(item, read), items))))

    def task_features(self, tokens: Tensor, task: TaskTensors) -> NDArray[np.float32]:
        """z under one finished task's network, of a padded chunk: (CHUNK, d)."""
        if self._runtime is not None:
            return self._runtime.task_features(tokens.numpy(), _task_model(task))
        on_device = TaskTensors(*(tensor.to(self.device) for tensor in task))
        with torch.inference_mode():
            out: NDArray[np.float32] = self.backbone.blocks(tokens.to(self.device), on_device).cpu().numpy()
            return out

    def frozen_features(self, tokens: Tensor) -> NDArray[np.float32]:
        """The frozen feature and its random features, of a padded chunk: (CHUNK, f + M)."""
        if self._runtime is not None:
            return np.concatenate(self._runtime.frozen_features(tokens.numpy()), axis=1)
        with torch.inference_mode():
            return torch.cat(self.backbone.frozen(tokens.to(self.device)), dim=1).cpu().numpy()

    def _trunk(self, pixels: Tensor) -> Tensor:
        if self.backbone.spec.is_transformer:  # the convolutions of a CNN compute each image alone
            pixels = padded(pixels)
        if self._runtime is not None:
            return torch.from_numpy(self._runtime.tokens(pixels.numpy()))
        # On a CPU, the depthwise convolutions of a CNN take two thirds of the time with channels last.
        pixels = pixels.to(self.device, memory_format=torch.channels_last)
        with torch.no_grad():
            out: Tensor = self.backbone.trunk(pixels).cpu()
            return out

    def _pixels(self, item: Item, read: Reader) -> NDArray[np.float32]:
        key, numbered = item
        turns, view = divmod(numbered, MAX_VIEWS)
        if turns:
            return turn(self._pixels((key, view), read), turns)
        preprocessing = self.backbone.spec.preprocessing
        if view == 0:
            return load_pixels(read(key), preprocessing)
        # A view is a crop: decode it larger than the plain image.
        image = read_image(read(key), hint=preprocessing.resize * 5 // 4)
        return preprocessing.apply(augment(image, random_stream(self._seed, "view", key, view)))


def turned_view(view: int, turns: int) -> int:
    """The number of a view that is turned by quarters of a circle."""
    return view + MAX_VIEWS * turns


def padded(rows: Tensor) -> Tensor:
    """A whole chunk."""
    extra = CHUNK - len(rows)
    return torch.cat([rows, rows.new_zeros(extra, *rows.shape[1:])]) if extra else rows


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
