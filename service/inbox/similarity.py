"""How similar two images are: by perceptual hash, and by the direction of the model's embedding."""

import io
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.JpegImagePlugin import JpegImageFile

from models.images import ImageLimits, open_image

SIDE = 32  # pixels per side of the thumbnail that is hashed
FREQUENCIES = 8  # low frequencies per direction that are hashed
DECODE_HINT = 64  # pixels per side: a large JPEG is decoded at a fraction of its size, but not below this

# Ignore coefficients this close to the median: rounding to whole grey levels and JPEG change them by as much. Without
# this margin the empty frequencies of a plain image would hash to noise.
NOISE_MARGIN = 2.0


def _dct_matrix() -> NDArray[np.float64]:
    """The first FREQUENCIES rows of the orthonormal DCT-II of SIDE points."""
    frequency, point = np.arange(FREQUENCIES)[:, None], np.arange(SIDE)[None, :]
    matrix: NDArray[np.float64] = np.cos(np.pi * frequency * (2 * point + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
    matrix[0] /= np.sqrt(2)
    return matrix


_DCT = _dct_matrix()  # (FREQUENCIES, SIDE)


def perceptual_hash(image: Image.Image) -> int:
    """64 bits that hardly change when an image is encoded again, resized or made slightly brighter.

    One bit per low frequency: whether it is above the median. The mean brightness (DC) is left out, its bit is always
    0; so is the hash of an image of one colour.
    """
    # Grey before small: resizing one channel instead of three.
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    grey = np.asarray(small).astype(np.float64)  # (SIDE, SIDE)
    waves = (_DCT @ grey @ _DCT.T).ravel()[1:]  # (63,)
    bits = waves > np.median(waves) + NOISE_MARGIN
    return int.from_bytes(np.packbits(np.concatenate([[False], bits])).tobytes(), "big")


def hamming(a: int, many: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """The number of bits in which each of n hashes differs from `a`: (n,)."""
    counts: NDArray[np.uint8] = np.bitwise_count(many ^ np.uint64(a))
    return counts


def unit_vector(vector: NDArray[np.floating]) -> NDArray[np.float32] | None:
    """An embedding scaled to length 1; None when that is impossible: empty, all zero, or not all finite."""
    # In float64, where the squares of float32 numbers cannot overflow.
    wide = np.asarray(vector, dtype=np.float64).ravel()
    length = float(np.linalg.norm(wide)) if wide.size else 0.0
    if length == 0 or not np.isfinite(length):
        return None
    return (wide / length).astype(np.float32)


# The least cosine of an embedding and a group's mean: on a scale, and without one. Chosen on training images, by the
# clicks that labelling takes: docs/operations.md, "Groups of the inbox".
SCALED_COSINE = 0.25
PLAIN_COSINE = 0.5


@dataclass(frozen=True, eq=False)
class EmbeddingScale:
    """How embeddings are compared: by their cosine from `centre` on, each dimension with a weight.

    The features of a backbone have a large part in common, which hides what distinguishes two classes, and dimensions
    that vary within a class say little.
    """

    centre: NDArray[np.float32]  # (d,), the mean of the known classes
    weights: NDArray[np.float32]  # (d,), the inverse variance within a class
    least_cosine: float = SCALED_COSINE  # of a novelty and its group

    def direction(self, embedding: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
        """(u, o): the cosine with a sum s of k embeddings is (s u - k o) / norm(s, k)."""
        centred = embedding - self.centre
        weighted = self.weights * centred
        length = float(np.sqrt(weighted @ centred))
        u = (weighted / max(length, 1e-9)).astype(np.float32)
        return u, float(self.centre @ u)

    def norm(self, total: NDArray[np.float32], count: int) -> float:
        """The length of a sum of `count` embeddings."""
        centred = total - count * self.centre
        return float(np.sqrt((self.weights * centred) @ centred))


class ImageInfo(NamedTuple):
    bytes: int
    hash: int
    width: int  # as sent, upright
    height: int


def inspect_image(data: bytes, limits: ImageLimits) -> ImageInfo:
    """Decode an image as small as the hash allows; raises only `ImageError`."""
    with open_image(data, limits, hint=DECODE_HINT) as image:
        return ImageInfo(len(data), perceptual_hash(image), *_upright_size(data, image.size))


def _upright_size(data: bytes, decoded: tuple[int, int]) -> tuple[int, int]:
    """Width and height as sent; only a JPEG may have been decoded at a smaller size."""
    if not data.startswith(b"\xff\xd8\xff"):
        return decoded
    with JpegImageFile(io.BytesIO(data)) as header:
        width, height = header.size
        turned = False
        with suppress(Exception):  # the image reader also treats damaged metadata as upright
            turned = int(header.getexif().get(ExifTags.Base.Orientation, 1)) in (5, 6, 7, 8)
    return (height, width) if turned else (width, height)
