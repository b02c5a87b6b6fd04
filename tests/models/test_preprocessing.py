"""Preprocessing: torchvision's pixels, strips, and validation."""

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import TypeAdapter
from torchvision import transforms

from models.images import Preprocessing, load_pixels
from tests.support.bad_images import encode
from tests.support.encoded_images import IMAGENET, noise, smooth


@given(
    width=st.integers(1, 500),
    height=st.integers(1, 500),
    sizes=st.sampled_from([(256, 224), (224, 224), (64, 57), (33, 32)]),
    interpolation=st.sampled_from(["bicubic", "bilinear"]),
)
@settings(max_examples=60, deadline=None)
def test_preprocessing_equals_torchvision(width: int, height: int, sizes: tuple[int, int], interpolation: Any) -> None:
    if max(width, height) > 16 * min(width, height):
        width = height
    ours = Preprocessing(*sizes, interpolation, IMAGENET.mean, IMAGENET.std)
    theirs = transforms.Compose(
        [
            transforms.Resize(sizes[0], transforms.InterpolationMode(interpolation)),
            transforms.CenterCrop(sizes[1]),
            transforms.ToTensor(),
            transforms.Normalize(IMAGENET.mean, IMAGENET.std),
        ]
    )
    image = Image.fromarray(noise(width, height, seed=width * 1000 + height))
    result = ours.apply(image)
    assert result.dtype == np.float32
    assert result.shape == (3, sizes[1], sizes[1])
    assert np.abs(result - theirs(image).numpy()).max() < 1e-5


@pytest.mark.parametrize("size", [(1, 20_000), (20_000, 1), (3, 20_001), (20_000, 7)])
def test_a_long_strip_is_cropped_around_its_centre(size: tuple[int, int]) -> None:
    strip = np.zeros((size[1], size[0], 3), np.uint8)
    centre = (size[1] // 2, size[0] // 2)
    reach = 2 * min(size)
    strip[max(0, centre[0] - reach) : centre[0] + reach, max(0, centre[1] - reach) : centre[1] + reach] = 255
    plain = Preprocessing(256, 224, "bicubic", (0, 0, 0), (1, 1, 1))
    assert plain.apply(Image.fromarray(strip)).min() == 1.0
    assert load_pixels(encode(Image.fromarray(strip), "PNG"), plain).shape == (3, 224, 224)


def test_a_strip_just_over_the_limit_gives_nearly_torchvisions_pixels() -> None:
    image = smooth(40, 661)
    ours = Preprocessing(64, 64, "bilinear", (0, 0, 0), (1, 1, 1)).apply(image)
    theirs = transforms.Compose([transforms.Resize(64), transforms.CenterCrop(64), transforms.ToTensor()])(image)
    assert np.abs(ours - theirs.numpy()).max() < 2 / 255


def preprocessing_from(values: dict[str, Any]) -> Preprocessing:
    return TypeAdapter(Preprocessing).validate_python(values)


def test_preprocessing_survives_json_with_its_hash() -> None:
    again = preprocessing_from(json.loads(json.dumps(asdict(IMAGENET))))
    assert again == IMAGENET
    assert again.sha256 == IMAGENET.sha256
    assert len(IMAGENET.sha256) == 64


def test_the_hash_depends_on_every_field_and_only_on_values() -> None:
    base = asdict(IMAGENET)
    changes: list[dict[str, Any]] = [
        {"resize": 255},
        {"crop": 223},
        {"interpolation": "bilinear"},
        {"mean": [0, 0, 0]},
        {"std": [1, 1, 1]},
    ]
    hashes = {preprocessing_from(base | change).sha256 for change in [{}, *changes]}
    assert len(hashes) == 6
    whole = preprocessing_from(base | {"mean": [0, 0, 0]})
    assert whole.sha256 == preprocessing_from(base | {"mean": [0.0, 0.0, 0.0]}).sha256


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"crop": 257}, "crop must be at most resize, not 257 of 256"),
        ({"crop": 0}, "crop\n.*greater than 0"),
        ({"crop": None}, "crop\n.*valid integer"),
        ({"resize": "256"}, "resize\n.*valid integer"),
        ({"interpolation": "nearest"}, "interpolation\n.*'bicubic' or 'bilinear'"),
        ({"mean": [0.5, 0.5]}, "mean.2\n.*required"),
        ({"std": [1, 0, 1]}, "std.1\n.*greater than 0"),
        ({"std": 1}, "std\n.*tuple"),
        ({"mean": [0, 0, float("nan")]}, "mean.2\n.*finite"),
        ({"surprise": 1}, "surprise\n.*Unexpected"),
    ],
)
def test_preprocessing_refuses_invalid_values(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        preprocessing_from(asdict(IMAGENET) | change)


def test_preprocessing_refuses_a_missing_value() -> None:
    values = asdict(IMAGENET)
    del values["std"]
    with pytest.raises(ValueError, match=r"std\n.*required"):
        preprocessing_from(values)
