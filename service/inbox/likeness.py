"""How alike two pictures are: by what a person sees at a glance (the perceptual hash), and by what the model sees."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 32  # the hash looks at a thumbnail of this many pixels a side
LOW = 8  # and keeps this many frequencies a direction

# A coefficient this close to the median says nothing: rounding to whole grey levels and JPEG move it by as much.
# Without it the many empty frequencies of a plain picture would be hashed to noise.
QUIET = 2.0


def _dct_matrix() -> NDArray[np.float64]:
    """The first LOW rows of the orthonormal DCT-II of SIDE points."""
    frequency, point = np.arange(LOW)[:, None], np.arange(SIDE)[None, :]
    matrix: NDArray[np.float64] = np.cos(np.pi * frequency * (2 * point + 1) / (2 * SIDE)) * np.sqrt(2 / SIDE)
    matrix[0] /= np.sqrt(2)
    return matrix


_DCT = _dct_matrix()  # (LOW, SIDE)


def perceptual_hash(image: Image.Image) -> int:
    """64 bits that stay nearly the same when a picture is encoded again, resized or made a little brighter.

    One bit for each low frequency: is it above the median of them? The mean brightness (DC) takes no part, its bit is
    always 0; so is the hash of a picture of one colour.
    """
    # Grey before small: of a large picture, three channels would be resized to throw two away.
    small = image.convert("L").resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    grey = np.asarray(small).astype(np.float64)  # (SIDE, SIDE)
    waves = (_DCT @ grey @ _DCT.T).ravel()[1:]  # (63,)
    bits = waves > np.median(waves) + QUIET
    return int.from_bytes(np.packbits(np.concatenate([[False], bits])).tobytes(), "big")


def hamming(a: int, many: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """How many bits each of n hashes differs in from `a`: (n,)."""
    counted: NDArray[np.uint8] = np.bitwise_count(many ^ np.uint64(a))
    return counted


def unit(vector: NDArray[np.floating]) -> NDArray[np.float32] | None:
    """The direction of an embedding, of length 1; None when it has none: empty, all zero, or not all finite."""
    # In float64, where the squares of float32 numbers cannot overflow.
    wide = np.asarray(vector, dtype=np.float64).ravel()
    length = float(np.linalg.norm(wide)) if wide.size else 0.0
    if length == 0 or not np.isfinite(length):
        return None
    return (wide / length).astype(np.float32)


def cosine(a: NDArray[np.float32], many: NDArray[np.float32]) -> NDArray[np.float32]:
    """The cosine between an embedding (d,) and each of n others (n, d), all of length 1: see `unit`."""
    return many @ a
