"""Perceptual hashes and unit vectors."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.images import read_image
from service.inbox.similarity import hamming, perceptual_hash, unit_vector
from tests.support.inbox import COPIES, SHAPES, encode, scene

FOLD_BITS = 6  # the inbox's default
SEEDS = range(6)


def hash_of(data: bytes) -> int:
    return perceptual_hash(read_image(data, hint=64))


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_copy_of_an_image_has_nearly_the_same_hash(shape: str, copy: str) -> None:
    for seed in SEEDS:
        image = scene(seed, shape)
        differing = (hash_of(encode(image, quality=85)) ^ hash_of(COPIES[copy](image))).bit_count()
        assert differing <= FOLD_BITS, (seed, differing)


def test_different_shapes_in_the_same_place_and_colours_have_different_hashes() -> None:
    hashes = {(seed, shape): hash_of(encode(scene(seed, shape))) for seed in SEEDS for shape in SHAPES}
    for (one, a), (other, b) in itertools.combinations(hashes.items(), 2):
        assert one[1] == other[1] or (a ^ b).bit_count() > FOLD_BITS, (one, other)


@pytest.mark.parametrize("colour", ["black", "white", "grey", "orange"])
@pytest.mark.parametrize("size", [(1, 1), (7, 3), (300, 200)])
def test_the_hash_of_an_image_of_one_colour_is_zero(colour: str, size: tuple[int, int]) -> None:
    assert perceptual_hash(Image.new("RGB", size, colour)) == 0


def test_the_hash_agrees_with_the_dct_of_scipy() -> None:
    fft = pytest.importorskip("scipy.fft")
    image = scene(1)
    grey = np.asarray(image.convert("L").resize((32, 32), Image.Resampling.LANCZOS)).astype(np.float64)
    low = fft.dctn(grey, norm="ortho")[:8, :8].ravel()
    bits = low > np.median(low[1:]) + 2
    bits[0] = False
    assert perceptual_hash(image) == int("".join("1" if bit else "0" for bit in bits), 2)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 50), st.integers(1, 50), st.sampled_from(["RGB", "L"]), st.integers(0, 2**32))
def test_every_image_has_a_hash_of_64_bits(width: int, height: int, mode: str, seed: int) -> None:
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))
    assert 0 <= perceptual_hash(image) < 2**64


@given(st.integers(0, 2**64 - 1), st.lists(st.integers(0, 2**64 - 1), max_size=8))
def test_hamming_counts_the_bits_that_differ(a: int, many: list[int]) -> None:
    assert hamming(a, np.array(many, dtype=np.uint64)).tolist() == [(a ^ b).bit_count() for b in many]


def test_the_product_of_unit_vectors_is_their_cosine() -> None:
    vectors = [unit_vector(np.array(values)) for values in ([3, 4, 0], [0.3, 0.4, 0], [-4, 3, 0], [-3, -4, 0])]
    a, *_ = many = [vector for vector in vectors if vector is not None]
    np.testing.assert_allclose(np.stack(many) @ a, [1, 1, 0, -1], atol=1e-6)


@pytest.mark.parametrize("values", [[], [0, 0], [1, np.nan], [np.inf, 1]])
def test_an_embedding_without_a_direction_has_no_unit_vector(values: list[float]) -> None:
    assert unit_vector(np.array(values, dtype=np.float32)) is None


def test_the_unit_vector_of_huge_and_tiny_embeddings_has_length_1() -> None:
    for scale in (1e38, 1e-38):
        direction = unit_vector(np.full(1280, scale, dtype=np.float32))
        assert direction is not None
        assert np.linalg.norm(direction) == pytest.approx(1, abs=1e-5)
