"""Images of the demo: views of photographs that scikit-image contains.

Each class is ONE photograph, cropped, rotated, with other brightness and another JPEG quality. This shows the loop
without a download; it does not measure accuracy.
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
MAX_SIDE = 512  # pixels of a photograph's longer side
VIEW_SIZE = (320, 240)


def photograph(name: str) -> Image.Image:
    try:
        from skimage.data import data_dir
    except ModuleNotFoundError as error:
        raise OpenWorldError("not installed: scikit-image. Install it: pip install 'openworld[demo]'") from error
    image = Image.open(Path(data_dir) / PHOTOGRAPHS[name]).convert("RGB")
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return image


def views(name: str, count: int, first: int = 0) -> list[bytes]:
    """Views number `first` to `first + count` of one photograph; a number determines a view."""
    image = photograph(name)
    return [_view(image, np.random.default_rng([number, *name.encode()])) for number in range(first, first + count)]


def _view(image: Image.Image, rng: np.random.Generator) -> bytes:
    rotated = image.rotate(rng.uniform(-12, 12), Image.Resampling.BICUBIC, fillcolor=(127, 127, 127))
    width, height = rotated.size
    share = rng.uniform(0.55, 0.9)
    w, h = int(width * share), int(height * share)
    left, top = int(rng.integers(0, width - w + 1)), int(rng.integers(0, height - h + 1))
    view = rotated.crop((left, top, left + w, top + h)).resize(VIEW_SIZE, Image.Resampling.BILINEAR)
    for enhance in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        view = enhance(view).enhance(rng.uniform(0.7, 1.3))
    view = view.filter(ImageFilter.GaussianBlur(rng.uniform(0, 1.2)))
    buffer = io.BytesIO()
    view.save(buffer, format="JPEG", quality=int(rng.integers(70, 95)))
    return buffer.getvalue()
