"""Images that cannot be read: every kind of bytes gives an ImageError, and never another exception."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import BrokenImage, ImageError, ImageTooLarge, UnsupportedImage
from models.images import ImageLimits, read_image
from tests.support.bad_images import encode, png
from tests.support.encoded_images import FORMATS, JPEG, PNG, WEBP, smooth


def test_too_many_bytes_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ImageTooLarge, match="bytes"):
        read_image(b"x" * 11, ImageLimits(max_bytes=10))
    assert read_image(PNG, ImageLimits(max_bytes=len(PNG)))


@pytest.mark.parametrize("data", [JPEG, PNG, WEBP])
def test_too_many_pixels_are_refused(data: bytes) -> None:
    assert read_image(data, ImageLimits(max_pixels=64 * 48))
    with pytest.raises(ImageTooLarge, match="64 x 48"):
        read_image(data, ImageLimits(max_pixels=64 * 48 - 1))


def test_a_hint_does_not_bypass_the_pixel_limit() -> None:
    with pytest.raises(ImageTooLarge):
        read_image(encode(smooth(800, 800), "JPEG"), ImageLimits(max_pixels=10_000), hint=10)


@pytest.mark.parametrize("side", [9_000, 12_000, 100_000, 2**31 - 1])
def test_a_decompression_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(ImageTooLarge, match="pixels"):
        read_image(png(side, side, 8, 2, b"\0" * 1000))


def test_an_image_without_pixel_data_is_broken() -> None:
    with pytest.raises(BrokenImage):
        read_image(png(5_000, 5_000, 8, 2, b"\0" * 10))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("kept", [0.3, 0.6, 0.9])
def test_a_truncated_image_is_refused(name: str, kept: float) -> None:
    data = FORMATS[name]
    with pytest.raises(BrokenImage):
        read_image(data[: int(len(data) * kept)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_header_alone_is_broken(name: str) -> None:
    with pytest.raises(BrokenImage):
        read_image(FORMATS[name][:12])


@pytest.mark.parametrize("format", ["GIF", "BMP", "TIFF", "PPM", "ICO", "PDF"])
def test_another_format_is_unsupported(format: str) -> None:
    with pytest.raises(UnsupportedImage):
        read_image(encode(smooth(32, 32), format))


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg/>", b"RIFF\0\0\0\0WAVEfmt ", b"\xff\xd8", b"\x89PNG"])
def test_bytes_that_are_not_an_image_are_unsupported(data: bytes) -> None:
    with pytest.raises(UnsupportedImage):
        read_image(data)


def only_image_errors(data: bytes) -> None:
    try:
        image = read_image(data, ImageLimits(max_pixels=1_000_000), hint=16)
    except ImageError:
        return
    assert image.mode == "RGB"
    assert min(image.size) >= 1


@given(
    st.binary(max_size=400), st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\x40\0\0\0WEBPVP8 "])
)
@settings(max_examples=150, deadline=None)
def test_arbitrary_bytes_raise_only_image_errors(data: bytes, magic: bytes) -> None:
    only_image_errors(magic + data)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_mutated_image_raises_only_image_errors(name: str, data: st.DataObject) -> None:
    mutated = bytearray(FORMATS[name])
    # The structure of a file, and so most errors, is near its start.
    places = st.one_of(st.integers(0, min(700, len(mutated) - 1)), st.integers(0, len(mutated) - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        mutated[place] = value
    only_image_errors(
        bytes(mutated[: data.draw(st.integers(1, len(mutated)))] if data.draw(st.booleans()) else mutated)
    )
