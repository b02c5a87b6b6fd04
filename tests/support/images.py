"""Small encoded images, and folders of them."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image


def make_image(seed: int, size: tuple[int, int] = (32, 32), format: str = "JPEG") -> bytes:
    """Random pixels, determined by `seed`. `size` is (width, height)."""
    width, height = size
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format=format)
    return buffer.getvalue()


def write_classes(root: Path, classes: Mapping[str, Sequence[bytes]]) -> Path:
    """Write one sub-folder per class with files 0.jpg, 1.jpg, ... and return `root`."""
    for name, images in classes.items():
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(images):
            (folder / f"{number}.jpg").write_bytes(data)
    return root
