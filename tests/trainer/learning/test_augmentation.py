"""Augmented views of training images."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from trainer.learning.forward_passes import augment


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_augmentation_keeps_most_of_the_image(width: int, height: int, seed: int) -> None:
    result = augment(Image.new("RGB", (width, height)), np.random.default_rng(seed))
    assert result.mode == "RGB"
    assert 1 <= result.width <= width
    assert 1 <= result.height <= height
    # Rounding changes each side by up to half a pixel.
    assert (result.width + 0.5) * (result.height + 0.5) >= 0.8 * width * height
    stretch = (result.width / width) / (result.height / height)
    if min(width, height) >= 100:
        assert 0.88 <= stretch <= 1.12


def test_the_same_generator_gives_the_same_augmentation() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8)
    first, second = (augment(Image.fromarray(noise), np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(pixels(first), pixels(second))


def test_half_of_the_views_are_mirrored() -> None:
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 64).astype(np.uint8)[:, None], (64, 1, 3)))
    views = [pixels(augment(ramp, np.random.default_rng(seed)))[:, :, 0] for seed in range(200)]
    assert 70 <= sum(bool(view[0, 0] > view[0, -1]) for view in views) <= 130


def test_brightness_changes_by_at_most_fifteen_percent() -> None:
    grey = Image.new("RGB", (32, 32), (100,) * 3)
    means = [pixels(augment(grey, np.random.default_rng(seed))).mean() for seed in range(100)]
    assert 84 <= min(means) < 92
    assert 108 < max(means) <= 116
