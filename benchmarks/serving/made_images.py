"""Generated images that are as expensive to decode as photographs; deterministic, no download.

Noise with amplitude 1/f has the spectrum of natural images, so its JPEG is as large and as slow to decode as that of a
photograph. A class is a palette, a grain and a direction.
"""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

WIDTH, HEIGHT, QUALITY = 340, 256, 85


def make_image(name: str, number: int) -> bytes:
    """Image `number` of a class, as JPEG."""
    style = np.random.default_rng(zlib.crc32(name.encode()))
    slope, angle, stretch = style.uniform(1.2, 1.5), style.uniform(0, np.pi), style.uniform(1, 4)
    palette = style.uniform(-1, 1, (3, 3)) * 45
    light = style.uniform(70, 185, 3)
    rng = np.random.default_rng(zlib.crc32(f"{name}/{number}".encode()))
    amplitude = _amplitude(slope, angle, stretch)
    fields = np.stack([_field(rng, amplitude) for _ in range(3)], axis=-1)  # (H, W, 3)
    pixels = np.clip(fields @ palette + light, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=QUALITY)
    return buffer.getvalue()


def _amplitude(slope: float, angle: float, stretch: float) -> NDArray[np.float64]:
    """Amplitude per frequency: f ** -slope, stretched along one direction."""
    y, x = np.meshgrid(np.fft.fftfreq(HEIGHT), np.fft.rfftfreq(WIDTH), indexing="ij")
    along, across = x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
    frequency = np.hypot(along * stretch, across)
    frequency[0, 0] = 1.0
    out: NDArray[np.float64] = frequency**-slope
    out[0, 0] = 0.0
    return out


def _field(rng: np.random.Generator, amplitude: NDArray[np.float64]) -> NDArray[np.float64]:
    """Noise with these amplitudes, mean 0, standard deviation 1: (H, W)."""
    waves = rng.normal(size=amplitude.shape) + 1j * rng.normal(size=amplitude.shape)
    field = np.fft.irfft2(waves * amplitude, s=(HEIGHT, WIDTH))
    out: NDArray[np.float64] = field / field.std()
    return out


def write_images(root: Path, classes: Sequence[str], numbers: range) -> Mapping[str, list[Path]]:
    """Write one sub-folder per class."""
    out: dict[str, list[Path]] = {}
    for name in classes:
        (root / name).mkdir(parents=True)
        out[name] = [root / name / f"{number}.jpg" for number in numbers]
        for number, path in zip(numbers, out[name], strict=True):
            path.write_bytes(make_image(name, number))
    return out
