"""Pictures for the demo: real photographs that come inside scikit-image, as a moving camera would see them.

Each class is ONE photograph, seen many times: from nearer and farther, a little turned, in other light, through another
JPEG encoder. That shows the loop, with pictures that everybody has; it says nothing about accuracy on your own.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image, ImageEnhance, ImageFilter

from models.errors import OpenWorldError

PHOTOGRAPHS = {
    "cat": "chelsea.png",
    "coffee": "coffee.png",
    "rocket": "rocket.jpg",
    "motorcycle": "motorcycle_left.png",
    "astronaut": "astronaut.png",
    "coins": "coins.png",
}
LARGEST = 512  # of a photograph's longer side: nothing is gained from more
SIDE = (320, 240)  # of a view


def photograph(name: str) -> Image.Image:
    try:
        from skimage.data import data_dir
    except ModuleNotFoundError as error:
        raise OpenWorldError("the demo's photographs are in scikit-image: pip install 'openworld[demo]'") from error
    image = Image.open(Path(data_dir) / PHOTOGRAPHS[name]).convert("RGB")
    image.thumbnail((LARGEST, LARGEST))
    return image


def views(name: str, count: int, first: int = 0) -> list[bytes]:
    """`count` views of one photograph; other numbers are other views, the same numbers the same."""
    image = photograph(name)
    return [_view(image, np.random.default_rng([number, *name.encode()])) for number in range(first, first + count)]


def _view(image: Image.Image, rng: np.random.Generator) -> bytes:
    turned = image.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, fillcolor=(127, 127, 127))
    width, height = turned.size
    share = rng.uniform(0.55, 0.9)
    w, h = int(width * share), int(height * share)
    left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
    view = turned.crop((left, top, left + w, top + h)).resize(SIDE, Image.Resampling.BILINEAR)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        view = enhance(view).enhance(rng.uniform(0.7, 1.3))
    view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.2)))
    buffer = io.BytesIO()
    view.save(buffer, format="JPEG", quality=int(rng.integers(70, 95)))
    return buffer.getvalue()
