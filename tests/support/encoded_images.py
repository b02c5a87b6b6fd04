"""Encoded images for the image reader, one per format."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from models.images import Preprocessing
from tests.support.bad_images import encode

IMAGENET = Preprocessing(256, 224, "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


def noise(width: int, height: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def smooth(width: int, height: int) -> Image.Image:
    """A photograph-like image, which lossy formats change little."""
    across = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([across, down, 255 - across], axis=-1).astype(np.uint8))


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


JPEG = encode(smooth(64, 48), "JPEG")
PROGRESSIVE = encode(smooth(64, 48), "JPEG", progressive=True)
PNG = encode(Image.fromarray(noise(64, 48)), "PNG")
WEBP = encode(smooth(64, 48), "WEBP")
LOSSLESS_WEBP = encode(Image.fromarray(noise(64, 48)), "WEBP", lossless=True)
FORMATS = {"jpeg": JPEG, "progressive": PROGRESSIVE, "png": PNG, "webp": WEBP, "lossless webp": LOSSLESS_WEBP}
