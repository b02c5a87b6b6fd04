"""A copy of a picture hashes nearly the same, another picture does not; and the maths behind it."""

import io
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageEnhance

from models.images import read_image
from service.inbox.likeness import cosine, hamming, perceptual_hash, unit

FOLD_BITS = 6  # the inbox's default
SEEDS = range(6)
SHAPES = ("circle", "square", "triangle", "cross")

Change = Callable[[Image.Image], Image.Image]


def scene(seed: int, shape: str = "circle", size: tuple[int, int] = (240, 180)) -> Image.Image:
    """A shape on a gradient, with the noise of a camera; everything but the shape depends on the seed alone."""
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


def hash_of(data: bytes) -> int:
    return perceptual_hash(read_image(data, hint=64))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_of_a_picture_hashes_nearly_the_same(shape: str, copy: str) -> None:
    for seed in SEEDS:
        image = scene(seed, shape)
        differing = (hash_of(encode(image, quality=85)) ^ hash_of(COPIES[copy](image))).bit_count()
        assert differing <= FOLD_BITS, (seed, differing)


def test_different_shapes_hash_differently_even_in_the_same_place_and_colours() -> None:
    hashes = {(seed, shape): hash_of(encode(scene(seed, shape))) for seed in SEEDS for shape in SHAPES}
    for (one, a), (other, b) in itertools.combinations(hashes.items(), 2):
        assert one[1] == other[1] or (a ^ b).bit_count() > FOLD_BITS, (one, other)


@pytest.mark.parametrize("colour", ["black", "white", "grey", "orange"])
@pytest.mark.parametrize("size", [(1, 1), (7, 3), (300, 200)])
def test_a_flat_picture_hashes_to_zero(colour: str, size: tuple[int, int]) -> None:
    assert perceptual_hash(Image.new("RGB", size, colour)) == 0


def test_the_hash_is_the_textbook_dct() -> None:
    fft = pytest.importorskip("scipy.fft")
    image = scene(1)
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS)).astype(np.float64)
    low = fft.dctn(grey, norm="ortho")[:8, :8].ravel()
    bits = low > np.median(low[1:]) + 2
    bits[0] = False
    assert perceptual_hash(image) == int("".join("1" if bit else "0" for bit in bits), 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.sampled_from(["RGB", "L"]), st.integers(0, 2**32))
def test_any_picture_has_a_hash_of_64_bits(width: int, height: int, mode: str, seed: int) -> None:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
    assert 0 <= perceptual_hash(image) < 2**64


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=8))
def test_hamming_counts_the_bits_that_differ(a: int, many: list[int]) -> None:
    assert hamming(a, np.array(many, dtype=np.uint64)).tolist() == [(a ^ b).bit_count() for b in many]


def test_cosine_is_1_for_equal_directions_and_0_for_right_angles() -> None:
    vectors = [unit(np.array(values)) for values in ([3, 4, 0], [0.3, 0.4, 0], [-4, 3, 0], [-3, -4, 0])]
    a, *_ = many = [vector for vector in vectors if vector is not None]
    np.testing.assert_allclose(cosine(a, np.stack(many)), [1, 1, 0, -1], atol=1e-6)


@pytest.mark.parametrize("values", [[], [0, 0], [1, np.nan], [np.inf, 1]])
def test_an_embedding_without_a_direction_has_no_unit(values: list[float]) -> None:
    assert unit(np.array(values, dtype=np.float32)) is None


def test_the_unit_of_huge_and_tiny_embeddings_is_of_length_1() -> None:
    for scale in (1e38, 1e-38):
        direction = unit(np.full(1280, scale, dtype=np.float32))
        assert direction is not None
        assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-5)
