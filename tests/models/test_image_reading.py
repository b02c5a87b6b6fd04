"""Reading images: formats, colour modes, transparency, orientation and draft decoding."""

import io
import struct
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from models.images import load_pixels, read_image
from tests.support.bad_images import encode, png
from tests.support.encoded_images import (
    FORMATS,
    IMAGENET,
    JPEG,
    LOSSLESS_WEBP,
    PNG,
    PROGRESSIVE,
    WEBP,
    noise,
    pixels,
    smooth,
)

ORIENTATION = 0x0112


@pytest.mark.parametrize("data", [JPEG, PROGRESSIVE, WEBP])
def test_a_lossy_format_is_read_as_rgb(data: bytes) -> None:
    image = read_image(data)
    assert (image.mode, image.size) == ("RGB", (64, 48))
    assert np.abs(pixels(image) - pixels(smooth(64, 48))).mean() < 8


@pytest.mark.parametrize("data", [PNG, LOSSLESS_WEBP])
def test_a_lossless_format_keeps_every_pixel(data: bytes) -> None:
    assert np.array_equal(pixels(read_image(data)), noise(64, 48))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("size", [(1, 1), (1, 300), (300, 1)])
def test_a_tiny_image_is_read_and_preprocessed(format: str, size: tuple[int, int]) -> None:
    data = encode(Image.new("RGB", size, (250, 128, 5)), format)
    assert read_image(data).size == size
    assert load_pixels(data, IMAGENET).shape == (3, 224, 224)


@pytest.mark.parametrize("mode", ["L", "1"])
@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_grey_image_gets_three_equal_channels(mode: str, format: str) -> None:
    grey = Image.fromarray(np.full((8, 8), 255, np.uint8)).convert(mode)
    assert (pixels(read_image(encode(grey, format))) == 255).all()


def test_cmyk_becomes_rgb() -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    image = read_image(encode(red, "JPEG", quality=95))
    assert image.mode == "RGB"
    assert np.abs(pixels(image) - [255, 0, 0]).max() < 8


def test_sixteen_bit_grey_is_scaled_instead_of_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    image = read_image(encode(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(pixels(image)[..., 0], ramp >> 8)
    assert pixels(image).max() == 255


def test_sixteen_bit_grey_and_sixteen_bit_colour_agree() -> None:
    values = np.array([0, 255, 256, 32768, 65280, 65535], dtype=">u2")
    grey = read_image(png(6, 1, 16, 0, b"\0" + values.tobytes()))
    colour = read_image(png(6, 1, 16, 2, b"\0" + np.repeat(values, 3).tobytes()))
    assert np.array_equal(pixels(grey), pixels(colour))


def test_the_transparent_colour_of_a_sixteen_bit_grey_image_becomes_white() -> None:
    rows = b"\0" + np.array([0x1234, 0x1235], dtype=">u2").tobytes()
    image = read_image(png(2, 1, 16, 0, rows, extra=[(b"tRNS", struct.pack(">H", 0x1234))]))
    assert pixels(image)[0, :, 0].tolist() == [255, 0x12]


def test_the_transparent_colour_of_a_sixteen_bit_colour_image_does_not_match_other_colours() -> None:
    rows = b"\0" + np.array([0x1234] * 3 + [0x1235] * 3, dtype=">u2").tobytes()
    image = read_image(png(2, 1, 16, 2, rows, extra=[(b"tRNS", struct.pack(">HHH", 0x1234, 0x1234, 0x1234))]))
    assert pixels(image)[0, 1].tolist() == [0x12, 0x12, 0x12]


def test_transparent_pixels_become_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = [0, 128, 255]
    for data in (
        encode(Image.fromarray(rgba), "PNG"),
        encode(Image.fromarray(rgba), "WEBP", lossless=True, exact=True),
    ):
        assert pixels(read_image(data))[0, :, 0].tolist() == pytest.approx([255, 127, 0], abs=1)


def test_transparent_pixels_of_a_grey_image_become_white() -> None:
    la = Image.merge("LA", [Image.new("L", (2, 2), 10), Image.new("L", (2, 2), 0)])
    assert (pixels(read_image(encode(la, "PNG"))) == 255).all()


@pytest.mark.parametrize("transparency", [0, b"\x00\xff"])
def test_the_transparent_colour_of_a_palette_becomes_white(transparency: int | bytes) -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.putdata([0, 1])
    image = read_image(encode(palette, "PNG", transparency=transparency))
    assert pixels(image)[0].tolist() == [[255, 255, 255], [0, 0, 200]]


def test_a_palette_without_transparency_keeps_its_colours() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    palette.putdata([0, 1])
    assert pixels(read_image(encode(palette, "PNG")))[0].tolist() == [[200, 0, 0], [0, 0, 200]]


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_transparent_colour_becomes_white(mode: str) -> None:
    black = Image.new(mode, (2, 2))
    key = 0 if mode == "L" else (0, 0, 0)
    assert (pixels(read_image(encode(black, "PNG", transparency=key))) == 255).all()


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_an_animation_gives_its_first_frame(format: str, options: dict[str, Any]) -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    data = encode(red, format, save_all=True, append_images=[blue], duration=100, **options)
    with Image.open(io.BytesIO(data)) as animation:
        assert getattr(animation, "n_frames", 1) == 2
    assert (pixels(read_image(data)) == [255, 0, 0]).all()


def test_a_jpeg_of_several_images_gives_the_first() -> None:
    data = encode(Image.new("RGB", (8, 8), "red"), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])
    assert np.abs(pixels(read_image(data)) - [255, 0, 0]).max() < 8


# Orientation


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, [[10, 90, 170], [50, 130, 210]]),
        (2, [[170, 90, 10], [210, 130, 50]]),
        (3, [[210, 130, 50], [170, 90, 10]]),
        (4, [[50, 130, 210], [10, 90, 170]]),
        (5, [[10, 50], [90, 130], [170, 210]]),
        (6, [[50, 10], [130, 90], [210, 170]]),
        (7, [[210, 170], [130, 90], [50, 10]]),
        (8, [[170, 210], [90, 130], [10, 50]]),
        (0, [[10, 90, 170], [50, 130, 210]]),
        (9, [[10, 90, 170], [50, 130, 210]]),
    ],
)
def test_an_image_is_turned_upright(format: str, orientation: int, expected: list[list[int]]) -> None:
    stored = np.array([[10, 90, 170], [50, 130, 210]], np.uint8).repeat(16, axis=0).repeat(16, axis=1)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image = read_image(encode(Image.fromarray(stored).convert("RGB"), format, exif=exif.tobytes()))
    assert np.abs(pixels(image)[8::16, 8::16, 0] - np.array(expected)).max() <= 4
    assert image.getexif().get(ORIENTATION, 1) in (1, orientation if orientation not in range(2, 9) else 1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"])
def test_an_image_with_damaged_metadata_is_read(exif: bytes) -> None:
    assert read_image(encode(smooth(64, 48), "JPEG", exif=exif)).size == (64, 48)


# Draft decoding


@pytest.mark.parametrize(
    ("hint", "size"), [(None, (1600, 1200)), (256, (400, 300)), (150, (200, 150)), (2000, (1600, 1200))]
)
def test_a_hint_shrinks_a_jpeg_but_not_below_the_hint(hint: int | None, size: tuple[int, int]) -> None:
    data = encode(smooth(1600, 1200), "JPEG")
    assert read_image(data, hint=hint).size == size


@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 300))
@settings(max_examples=25, deadline=None)
def test_the_short_side_stays_at_least_the_hint(width: int, height: int, hint: int) -> None:
    image = read_image(encode(Image.new("RGB", (width, height)), "JPEG"), hint=hint)
    assert min(image.size) >= min(hint, width, height)


def test_a_hint_changes_the_pixels_little() -> None:
    data = encode(smooth(1600, 1200), "JPEG", quality=90)
    full, draft = IMAGENET.apply(read_image(data)), load_pixels(data, IMAGENET)
    assert np.abs(full - draft).mean() < 0.02


def test_a_hint_below_one_is_an_error() -> None:
    with pytest.raises(ValueError, match="hint"):
        read_image(JPEG, hint=0)


# Threads


def test_reading_is_thread_safe_and_changes_no_global_setting() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    expected = {name: load_pixels(data, IMAGENET) for name, data in FORMATS.items()}
    with ThreadPoolExecutor(4) as pool:
        jobs = [(name, pool.submit(load_pixels, data, IMAGENET)) for name, data in list(FORMATS.items()) * 4]
        assert all(np.array_equal(job.result(), expected[name]) for name, job in jobs)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
