"""What the inbox wants to know of a picture's pixels: its perceptual hash and its size."""

import io
from contextlib import suppress
from typing import NamedTuple

from PIL import ExifTags
from PIL.JpegImagePlugin import JpegImageFile

from models.images import ImageLimits, read_image
from service.inbox.likeness import perceptual_hash

HINT = 64  # pixels a side that the hash needs; a large JPEG is decoded no larger than it must be


class Look(NamedTuple):
    hash: int
    width: int  # as sent, upright
    height: int


def look_at(data: bytes, limits: ImageLimits) -> Look:
    """Decode an image as small as the hash allows; only `ImageError` is raised."""
    image = read_image(data, limits, hint=HINT)
    return Look(perceptual_hash(image), *_upright_size(data, image.size))


def _upright_size(data: bytes, decoded: tuple[int, int]) -> tuple[int, int]:
    """Width and height as sent; only a JPEG may have been decoded to less."""
    if not data.startswith(b"\xff\xd8\xff"):
        return decoded
    with JpegImageFile(io.BytesIO(data)) as header:
        width, height = header.size
        turned = False
        with suppress(Exception):  # damaged metadata counts as upright, as it does for the image reader
            turned = int(header.getexif().get(ExifTags.Base.Orientation, 1)) in (5, 6, 7, 8)
    return (height, width) if turned else (width, height)
