"""Sightings, embeddings and images for the inbox, and checks of its files."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance

from models.files import sha256_bytes
from service.inbox import STATES, Inbox, InboxLimits, Sighting
from service.inbox.similarity import unit_vector

SHAPES = ("circle", "square", "triangle", "cross")

Vector = NDArray[np.float32]
Change = Callable[[Image.Image], Image.Image]


@dataclass
class Clock:
    now: float = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def sighting(data: bytes, number: int = 0, embedding: Sequence[float] | None = None) -> Sighting:
    return Sighting(
        data=data,
        prediction_id=f"prediction-{number}",
        version=3,
        score=-1.5,
        calibrated_score=0.01,
        p_novel=0.75,
        nearest=[("apple", 0.5), ("pear", 0.25)],
        client="robot",
        embedding=None if embedding is None else np.array(embedding, dtype=np.float32),
    )


def open_inbox(root: Path, clock: Clock | None = None, **limits: float) -> contextlib.closing[Inbox]:
    chosen = clock or Clock()
    return contextlib.closing(Inbox(root, InboxLimits(**limits), chosen, wall_clock=chosen))  # type: ignore[arg-type]


def image_files(root: Path) -> dict[str, int]:
    """Sizes by name of all files below the image folder, including temporary ones."""
    return {path.name: path.stat().st_size for path in (root / "inbox" / "images").rglob("*") if path.is_file()}


def novelty_ids(inbox: Inbox) -> set[str]:
    return {item.id for state in STATES for item in inbox.list(state, limit=10_000).items}


def check_consistent(inbox: Inbox, root: Path, limits: InboxLimits) -> None:
    """Assert that the bounds hold, and that rows, images and sums agree."""
    found = image_files(root)
    assert novelty_ids(inbox) == set(found)
    assert sum(inbox.counts().values()) == len(found) <= limits.max_count
    assert inbox.bytes_used == sum(found.values()) <= limits.max_bytes
    for id in found:
        assert sha256_bytes(inbox.read_image(id)) == id


def random_direction(seed: int, length: int = 8) -> Vector:
    vector = unit_vector(np.random.default_rng(seed).normal(size=length))
    assert vector is not None
    return vector


def clusters(classes: int, each: int, dimensions: int, spread: float, seed: int = 0) -> list[tuple[int, Vector]]:
    """Shuffled pairs of class and embedding, sparse and positive like pooled features.

    With a spread of 0.3 the mean cosine is 0.71 within a class and 0.19 between classes; for Grocery photographs it is
    0.64 and 0.22.
    """
    rng = np.random.default_rng(seed)
    centres = rng.gamma(0.15, 1.0, (classes, dimensions))
    out = []
    for number in rng.permutation(classes * each):
        c = int(number) % classes
        own = rng.gamma(1 / spread, spread, dimensions)
        vector = unit_vector(centres[c] * own + rng.gamma(0.15, 0.5, dimensions))
        assert vector is not None
        out.append((c, vector))
    return out


def scene(seed: int, shape: str = "circle", size: tuple[int, int] = (240, 180)) -> Image.Image:
    """A shape on a gradient, with camera noise; only the shape does not depend on the seed."""
    generator = np.random.default_rng(seed)
    width, height = size
    across, down = np.linspace(0, 1, width)[None, :, None], np.linspace(0, 1, height)[:, None, None]
    ground = across * generator.integers(20, 130, 3) + down * generator.integers(20, 100, 3)  # (height, width, 3)
    image = Image.fromarray(ground.astype(np.uint8))
    x, y = (int(side * place) for side, place in zip(size, generator.uniform(0.35, 0.65, 2), strict=True))
    r = int(height * generator.uniform(0.25, 0.4))
    draw, colour = ImageDraw.Draw(image), tuple(int(value) for value in generator.integers(150, 240, 3))
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=colour)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=colour)
    else:
        draw.rectangle((x - r, y - r // 4, x + r, y + r // 4), fill=colour)
        draw.rectangle((x - r // 4, y - r, x + r // 4, y + r), fill=colour)
    noise = generator.normal(0, 4, (height, width, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def encode(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def resized(factor: float) -> Change:
    return lambda image: image.resize((int(image.width * factor), int(image.height * factor)))


def brightened(factor: float) -> Change:
    return lambda image: ImageEnhance.Brightness(image).enhance(factor)


COPIES: dict[str, Callable[[Image.Image], bytes]] = {
    "fine": lambda image: encode(image, quality=95),
    "coarse": lambda image: encode(image, quality=40),
    "png": lambda image: encode(image, "PNG"),
    "webp": lambda image: encode(image, "WEBP", quality=60),
    "half": lambda image: encode(resized(0.5)(image), quality=85),
    "twice": lambda image: encode(resized(2)(image), quality=85),
    "five times": lambda image: encode(resized(5)(image), quality=85),
    "brighter": lambda image: encode(brightened(1.05)(image), quality=85),
    "darker": lambda image: encode(brightened(0.92)(image), quality=85),
}
