"""Encoded image bytes to the pixels that the backbone takes; the trainer and the server share this reader."""

import hashlib
import io
import json
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile
from pydantic import ConfigDict, Field, PositiveFloat, model_validator
from pydantic.dataclasses import dataclass as validated_dataclass

from models.errors import BrokenImage, ImageError, ImageTooLarge, LargeImage, UnsupportedImage

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50_000_000

# Measured peaks of decoding and resizing: 17 bytes per pixel for WebP with transparency, 13 for PNG, 8 for JPEG.
DECODED_PIXEL_BYTES = 20
# A JPEG that is decoded at a reduced size counts as a third of its pixels in memory, because a progressive one keeps 6
# bytes per pixel, and as an eighth in time.
REDUCED_MEMORY, REDUCED_TIME = 3, 8
LARGE_PIXELS = 4_000_000  # an image with more takes long to decode

# The longest side that is resized, as a multiple of the short side. The centre crop uses no more than one short side;
# without the limit a 1 x 20000 strip would be resized to 256 x 5120000.
MAX_ASPECT = 16

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_RESAMPLING = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


class DecodeBudget:
    """Memory for decoded images, shared by all threads of a process. A thread waits until its image fits."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._used = 0
        self._freed = threading.Condition()

    @contextmanager
    def reserve(self, pixels: int) -> Iterator[None]:
        """Hold the memory of an image. ImageTooLarge if the whole budget is too small for it."""
        needed = pixels * DECODED_PIXEL_BYTES
        if needed > self._size:
            raise ImageTooLarge(
                f"the image needs {needed} bytes of memory, the limit is {self._size}: send a smaller one"
            )
        with self._freed:
            self._freed.wait_for(lambda: self._used + needed <= self._size)
            self._used += needed
        try:
            yield
        finally:
            with self._freed:
                self._used -= needed
                self._freed.notify_all()


@dataclass(frozen=True)
class ImageLimits:
    """The largest image that is decoded: bytes as sent, pixels as declared in its header; and the memory of all."""

    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS
    budget: DecodeBudget | None = None  # None: not limited


DEFAULT_LIMITS = ImageLimits()


@contextmanager
def open_image(
    data: bytes, limits: ImageLimits = DEFAULT_LIMITS, hint: int | None = None, *, small_only: bool = False
) -> Iterator[Image.Image]:
    """Decode JPEG, PNG or WebP bytes to an upright RGB image; for any other bytes, raise `ImageError`.

    With `hint`, a large JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, but its short side is at least `hint`.
    Transparent pixels become white, 16-bit channels keep their high byte, and an animation gives its first frame.
    With `small_only`, raise `LargeImage` for an image that takes long to decode. The memory of the image is reserved
    until the context ends: keep nothing of its size.
    """
    if hint is not None and hint < 1:
        raise ValueError(f"hint must be at least 1, not {hint}")
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(f"the image has {len(data)} bytes, the limit is {limits.max_bytes}: send a smaller one")
    with _decoding_errors():
        image = image_plugin(data)(io.BytesIO(data))
        declared = image.width * image.height
        if declared > limits.max_pixels:
            raise ImageTooLarge(
                f"the image has {image.width} x {image.height} pixels, the limit is {limits.max_pixels}: "
                "send a smaller one"
            )
        if hint is not None:
            image.draft(image.mode, (hint, hint))
    pixels = image.width * image.height
    if small_only and max(pixels, declared // REDUCED_TIME) > LARGE_PIXELS:
        raise LargeImage("the image takes long to decode")
    pixels = max(pixels, declared // REDUCED_MEMORY)
    with limits.budget.reserve(pixels) if limits.budget is not None else nullcontext():
        with _decoding_errors():
            rgb = _decode(image)
        del image  # its pixels are freed, unless they are those of `rgb`
        yield rgb


def read_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS, hint: int | None = None) -> Image.Image:
    """The image of `open_image`, to keep; its memory is no longer reserved."""
    with open_image(data, limits, hint) as image:
        return image


@contextmanager
def _decoding_errors() -> Iterator[None]:
    """Every error of a decoder as an `ImageError`."""
    try:
        yield
    except ImageError:
        raise
    except (MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        traceback.clear_frames(error.__traceback__)
        raise ImageTooLarge("the image needs too much memory: send a smaller one") from error
    except Exception as error:
        # Decoders raise many types (struct.error, KeyError, zlib.error, a warning made an error) for damaged bytes.
        traceback.clear_frames(error.__traceback__)  # they hold the decoder, and thereby the pixels
        raise BrokenImage(f"the image cannot be decoded, it is damaged or cut short: {error}") from error


def _decode(image: ImageFile) -> Image.Image:
    try:
        image.load()
    except BaseException:
        image.close()  # frees the pixels, which the frames of the error would keep
        raise
    upright = _UPRIGHT.get(_orientation(image))
    rgb = _to_rgb(image)
    if upright is not None:
        rgb = rgb.transpose(upright)
    # The orientation is applied: with the tag left in place, another reader would turn the image again.
    rgb.info = {}
    return rgb


PixelCount = Annotated[int, Field(strict=True, gt=0)]


@validated_dataclass(frozen=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))
class Preprocessing:
    """Resize the short side, crop the centre, normalise: torchvision's evaluation transform, without torch."""

    resize: PixelCount
    crop: PixelCount
    interpolation: Literal["bicubic", "bilinear"]
    mean: tuple[float, float, float]
    std: tuple[PositiveFloat, PositiveFloat, PositiveFloat]

    @model_validator(mode="after")
    def _crop_fits(self) -> Self:
        if self.crop > self.resize:
            raise ValueError(f"crop must be at most resize, not {self.crop} of {self.resize}")
        return self

    def apply(self, image: Image.Image) -> NDArray[np.float32]:
        """The normalised centre of the image: float32 (3, crop, crop).

        Equal to torchvision's Resize, CenterCrop, ToTensor and Normalize on a PIL image, except that a side longer than
        `MAX_ASPECT` times the other is first cropped to that length, around its centre.
        """
        image = _limit_aspect(image if image.mode == "RGB" else image.convert("RGB"))
        width, height = image.size
        short, long = min(width, height), max(width, height)
        new_long = int(self.resize * long / short)
        size = (self.resize, new_long) if width <= height else (new_long, self.resize)
        if size != image.size:
            image = image.resize(size, _RESAMPLING[self.interpolation])
        left, top = round((size[0] - self.crop) / 2), round((size[1] - self.crop) / 2)
        image = image.crop((left, top, left + self.crop, top + self.crop))
        pixels: NDArray[np.float32] = np.asarray(image).astype(np.float32)  # (crop, crop, 3)
        pixels /= 255
        pixels -= np.array(self.mean, dtype=np.float32)
        pixels /= np.array(self.std, dtype=np.float32)
        return np.ascontiguousarray(pixels.transpose(2, 0, 1))

    @property
    def sha256(self) -> str:
        """The hash of the canonical JSON: equal hashes mean equal pixels."""
        canonical = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def load_pixels(
    data: bytes, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS, *, small_only: bool = False
) -> NDArray[np.float32]:
    """Decode and preprocess: bytes to float32 (3, crop, crop). `small_only` as in `open_image`."""
    with open_image(data, limits, hint=preprocessing.resize, small_only=small_only) as image:
        return preprocessing.apply(image)


def image_plugin(data: bytes) -> type[ImageFile]:
    """Pillow's class for the format of these bytes; raises UnsupportedImage."""
    # Not Image.open: it does not distinguish a broken JPEG from a text file, and it reports large images by a warning,
    # which cannot be suppressed in one thread only.
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return WebPImageFile
    if not data:
        raise UnsupportedImage("the image is empty: send JPEG, PNG or WebP")
    raise UnsupportedImage("the bytes are not a supported image: send JPEG, PNG or WebP")


def _orientation(image: Image.Image) -> int:
    # Damaged metadata is common in otherwise valid images; they count as upright.
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    key = image.info.get("transparency")
    if image.mode in ("L", "RGB") and key is not None and np.max(key) > 255:
        # The transparent colour of a 16-bit image, whose low bytes are lost: it would match other colours as well.
        del image.info["transparency"]
    if image.has_transparency_data:
        rgba = image if image.mode == "RGBA" else image.convert("RGBA")
        page = Image.new("RGB", rgba.size, "white")
        page.paste(rgba, mask=rgba.getchannel("A"))
        return page
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    # Pillow's conversion clips values above 255 to white; for 16-bit colour it keeps the high byte.
    wide = np.asarray(image)  # uint16 or int32
    grey = np.clip(wide >> 8, 0, 255).astype(np.uint8)
    key = image.info.get("transparency")
    if isinstance(key, int):
        grey[wide == key] = 255
    return Image.fromarray(grey).convert("RGB")


def _limit_aspect(image: Image.Image) -> Image.Image:
    width, height = image.size
    longest = MAX_ASPECT * min(width, height)
    if max(width, height) <= longest:
        return image
    # The same length from both ends, so that the centre stays in place.
    cut = (max(width, height) - longest) // 2
    box = (0, cut, width, height - cut) if width < height else (cut, 0, width - cut, height)
    return image.crop(box)
