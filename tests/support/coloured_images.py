"""Batches of coloured images, which a pre-trained network tells apart by colour, and hashes of a folder."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
from PIL import Image

from tests.support.images import write_classes

COLOURS = {"red": (200, 30, 30), "green": (30, 180, 40), "blue": (30, 50, 200), "white": (235, 235, 235)}


def coloured_image(name: str, seed: int) -> bytes:
    """A JPEG of the colour `name` with noise."""
    rng = np.random.default_rng([seed, *COLOURS[name]])
    pixels = np.clip(np.array(COLOURS[name]) + rng.normal(0, 20, (48, 48, 3)), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG")
    return buffer.getvalue()


def write_colours(folder: Path, *names: str, images: range = range(6)) -> Path:
    """A batch with one class per colour."""
    return write_classes(folder, {name: [coloured_image(name, n) for n in images] for name in names})


def tree(folder: Path) -> dict[str, str]:
    """Path -> hash of every file, "" for a folder; without lock files, which are empty and stay."""
    paths = (path for path in sorted(folder.rglob("*")) if path.name != ".lock")
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        for path in paths
    }
