"""Encoded image bytes to the pixels that the backbone takes; the trainer and the server share this reader."""

import hashlib
import io
import json
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

from models.errors import BrokenImage, ImageError, ImageTooLarge, UnsupportedImage

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50_000_000

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


@dataclass(frozen=True)
class ImageLimits:
    """The largest image that is decoded: bytes as sent, pixels as declared in its header."""

    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS


DEFAULT_LIMITS = ImageLimits()


def read_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS, hint: int | None = None) -> Image.Image:
    """Decode JPEG, PNG or WebP bytes to an upright RGB image; for any other bytes, raise `ImageError`.

    With `hint`, a large JPEG may be decoded at 1/2, 1/4 or 1/8 of its size, but its short side is at least `hint`.
    Transparent pixels become white, 16-bit channels keep their high byte, and an animation gives its first frame.
    """
    if hint is not None and hint < 1:
        raise ValueError(f"hint must be at least 1, not {hint}")
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(f"the image has {len(data)} bytes, the limit is {limits.max_bytes}: send a smaller one")
    plugin = image_plugin(data)
    try:
        image = plugin(io.BytesIO(data))
        width, height = image.size
        if width * height > limits.max_pixels:
            raise ImageTooLarge(
                f"the image has {width} x {height} pixels, the limit is {limits.max_pixels}: send a smaller one"
            )
        if hint is not None:
            image.draft(image.mode, (hint, hint))
        image.load()
        upright = _UPRIGHT.get(_orientation(image))
        rgb = _to_rgb(image)
        if upright is not None:
            rgb = rgb.transpose(upright)
    except ImageError:
        raise
    except (MemoryError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge("the image needs too much memory: send a smaller one") from error
    except Exception as error:
        # Decoders raise many types (struct.error, KeyError, zlib.error, a warning made an error) for damaged bytes.
        raise BrokenImage(f"the image cannot be decoded, it is damaged or cut short: {error}") from error
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
        image = _limit_aspect(image.convert("RGB"))
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


def load_pixels(data: bytes, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.float32]:
    """Decode and preprocess: bytes to float32 (3, crop, crop)."""
    return preprocessing.apply(read_image(data, limits, hint=preprocessing.resize))


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
        rgba = image.convert("RGBA")
        page = Image.new("RGB", rgba.size, "white")
        page.paste(rgba, mask=rgba.getchannel("A"))
        return page
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    # Pillow's conversion clips values above 255 to white; for 16-bit colour it keeps the high byte.
    wide = np.asarray(image).astype(np.int64)
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
