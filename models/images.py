"""From bytes to the pixels that the backbone sees: the one image reader of the trainer and the server.

Both call `load_pixels`, so that a picture cannot look different when it is learned and when it is recognised.
"""

import hashlib
import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from models.errors import BrokenImage, ImageError, ImageTooLarge, UnsupportedImage

MAX_BYTES = 20 * 2**20
MAX_PIXELS = 50_000_000

# The longest side kept, as a multiple of the short one. The centre crop uses at most one short side of it, so that
# no picture people take is touched, while a 1 x 20000 strip cannot ask for a 256 x 5120000 canvas.
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
    """What one picture may cost: bytes as sent, pixels as declared by its header."""

    max_bytes: int = MAX_BYTES
    max_pixels: int = MAX_PIXELS


DEFAULT_LIMITS = ImageLimits()


def read_image(data: bytes, limits: ImageLimits = DEFAULT_LIMITS, hint: int | None = None) -> Image.Image:
    """Decode JPEG, PNG or WebP bytes to an upright RGB image; whatever the bytes are, only `ImageError` is raised.

    With `hint`, a large JPEG may come back smaller (decoded at 1/2, 1/4 or 1/8), its short side at least `hint`.
    Transparent parts show white, 16 bits keep their high byte, and of an animation the first frame counts.
    """
    if hint is not None and hint < 1:
        raise ValueError(f"hint must be at least 1, not {hint}")
    if len(data) > limits.max_bytes:
        raise ImageTooLarge(f"the image has {len(data)} bytes, the limit is {limits.max_bytes}: send a smaller one")
    plugin = _plugin(data)
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
        raise ImageTooLarge("the image needs more memory than it may have: send a smaller one") from error
    except Exception as error:
        # Decoders fail with whatever they tripped over (struct.error, KeyError, zlib.error, a warning made an error):
        # the set is open, and each of them means the same to the sender.
        raise BrokenImage(f"the image cannot be decoded, it is damaged or cut short: {error}") from error
    # The orientation has been applied: a tag left behind would turn the image again in the hands of the next reader.
    rgb.info = {}
    return rgb


@dataclass(frozen=True)
class Preprocessing:
    """Resize the short side, crop the centre, normalise: torchvision's evaluation transform, without torch."""

    resize: int
    crop: int
    interpolation: Literal["bicubic", "bilinear"]
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resize:
            raise ValueError(f"need 1 <= crop <= resize, not crop {self.crop} and resize {self.resize}")
        if self.interpolation not in _RESAMPLING:
            raise ValueError(f"interpolation must be one of {sorted(_RESAMPLING)}, not {self.interpolation!r}")
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise ValueError(f"need three means and three positive deviations, not {self.mean} and {self.std}")
        # Lists from JSON and integers hash like the tuples of floats they stand for.
        object.__setattr__(self, "mean", tuple(float(value) for value in self.mean))
        object.__setattr__(self, "std", tuple(float(value) for value in self.std))

    def apply(self, image: Image.Image) -> NDArray[np.float32]:
        """The normalised centre of the image, float32 of shape (3, crop, crop).

        Equal to torchvision's Resize, CenterCrop, ToTensor and Normalize on a PIL image, except that a side longer than
        `MAX_ASPECT` times the other is cut to that, around its centre, before it is resized.
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

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Preprocessing":
        """The inverse of `to_dict`; a missing, unknown or bad value is a ValueError."""
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            raise ValueError(f"preprocessing needs exactly {sorted(names)}, not {sorted(values)}")
        try:
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"preprocessing has a value of the wrong type: {error}") from error

    @property
    def sha256(self) -> str:
        """The hash of its canonical JSON: two versions with equal hashes see equal pixels."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def load_pixels(data: bytes, preprocessing: Preprocessing, limits: ImageLimits = DEFAULT_LIMITS) -> NDArray[np.float32]:
    """Read and preprocess: bytes to float32 (3, crop, crop)."""
    return preprocessing.apply(read_image(data, limits, hint=preprocessing.resize))


def _plugin(data: bytes) -> type[ImageFile]:
    # The decoder is chosen here and called directly, not through Image.open: that one cannot tell a broken JPEG from a
    # text file, and announces large images with a warning that cannot be silenced for one thread alone.
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImageFile
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImageFile
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return WebPImageFile
    if not data:
        raise UnsupportedImage("the image is empty: send JPEG, PNG or WebP")
    raise UnsupportedImage("the bytes are not an image that we read: send JPEG, PNG or WebP")


def _orientation(image: Image.Image) -> int:
    # Damaged metadata is common in pictures that are otherwise fine: those count as upright.
    try:
        return int(image.getexif().get(ExifTags.Base.Orientation, 1))
    except Exception:
        return 1


def _to_rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        return _from_16_bit(image)
    key = image.info.get("transparency")
    if image.mode in ("L", "RGB") and key is not None and np.max(key) > 255:
        # The key colour of a 16-bit image, whose low bytes are gone: it would match colours it does not mean.
        del image.info["transparency"]
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        page = Image.new("RGB", rgba.size, "white")
        page.paste(rgba, mask=rgba.getchannel("A"))
        return page
    return image if image.mode == "RGB" else image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    # Pillow's own conversion clips everything above 255 to white. The high byte is what it keeps of 16-bit colour.
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
    # Cut the same from both ends, so that the centre stays where it was.
    cut = (max(width, height) - longest) // 2
    box = (0, cut, width, height - cut) if width < height else (cut, 0, width - cut, height)
    return image.crop(box)
