"""Light augmentation for training; the server never sees it."""

import math

import numpy as np
from PIL import Image, ImageEnhance

MIN_AREA = 0.8
ASPECT = (0.9, 1.1)
JITTER = 0.15


def augment(image: Image.Image, rng: np.random.Generator, flip: bool = True) -> Image.Image:
    """A random crop of most of the image, mirrored half of the time if `flip`, a little brighter, darker or flatter.

    The aspect ratio is relative to the image's own: of a long picture no near-square crop could keep 80 % of the area.
    """
    # Every number is drawn on every call, so that `flip` does not shift the stream of random numbers.
    area = rng.uniform(MIN_AREA, 1.0)
    aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
    across, down = rng.random(2)
    mirrored = rng.random() < 0.5
    brightness, contrast = rng.uniform(1 - JITTER, 1 + JITTER, size=2)

    width = max(1, round(image.width * min(1.0, math.sqrt(area * aspect))))
    height = max(1, round(image.height * min(1.0, math.sqrt(area / aspect))))
    left, top = round(across * (image.width - width)), round(down * (image.height - height))
    image = image.crop((left, top, left + width, top + height))
    if flip and mirrored:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    image = ImageEnhance.Brightness(image).enhance(float(brightness))
    return ImageEnhance.Contrast(image).enhance(float(contrast))
