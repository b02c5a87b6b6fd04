"""Any bytes in: an upright RGB image out, or an ImageError; and the same pixels as torchvision's transform."""

import io
import json
import struct
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile
from pydantic import TypeAdapter
from torchvision import transforms

from models.errors import BrokenImage, ImageError, ImageTooLarge, UnsupportedImage
from models.images import ImageLimits, Preprocessing, load_pixels, read_image

IMAGENET = Preprocessing(256, 224, "bicubic", (0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
ORIENTATION = 0x0112


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(width: int, height: int, channels: int = 3, seed: int = 0) -> NDArray[np.uint8]:
    shape = (height, width, channels) if channels > 1 else (height, width)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def smooth(width: int, height: int) -> Image.Image:
    """A photograph-like picture: lossy formats keep it nearly as it is."""
    across = np.broadcast_to(np.linspace(0, 255, width), (height, width))
    down = np.broadcast_to(np.linspace(0, 255, height)[:, None], (height, width))
    return Image.fromarray(np.stack([across, down, 255 - across], axis=-1).astype(np.uint8))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG by hand, for what Pillow does not write; `rows` holds a filter byte before each row."""
    chunks = [(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)), *extra]
    chunks += [(b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in chunks)


def pixels(image: Image.Image) -> NDArray[np.int64]:
    return np.asarray(image).astype(np.int64)


JPEG = encode(smooth(64, 48), "JPEG")
PROGRESSIVE = encode(smooth(64, 48), "JPEG", progressive=True)
PNG = encode(Image.fromarray(noise(64, 48)), "PNG")
WEBP = encode(smooth(64, 48), "WEBP")
LOSSLESS_WEBP = encode(Image.fromarray(noise(64, 48)), "WEBP", lossless=True)
FORMATS = {"jpeg": JPEG, "progressive": PROGRESSIVE, "png": PNG, "webp": WEBP, "lossless webp": LOSSLESS_WEBP}


# What is read


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
def test_grey_becomes_three_equal_channels(mode: str, format: str) -> None:
    grey = Image.fromarray(np.full((8, 8), 255, np.uint8)).convert(mode)
    assert (pixels(read_image(encode(grey, format))) == 255).all()


def test_cmyk_becomes_rgb() -> None:
    red = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    image = read_image(encode(red, "JPEG", quality=95))
    assert image.mode == "RGB"
    assert np.abs(pixels(image) - [255, 0, 0]).max() < 8


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16).reshape(16, 16)
    image = read_image(encode(Image.fromarray(ramp), "PNG"))
    assert np.array_equal(pixels(image)[..., 0], ramp >> 8)
    assert pixels(image).max() == 255


def test_sixteen_bit_grey_and_sixteen_bit_colour_agree() -> None:
    values = np.array([0, 255, 256, 32768, 65280, 65535], dtype=">u2")
    grey = read_image(png(6, 1, 16, 0, b"\0" + values.tobytes()))
    colour = read_image(png(6, 1, 16, 2, b"\0" + np.repeat(values, 3).tobytes()))
    assert np.array_equal(pixels(grey), pixels(colour))


def test_the_key_colour_of_a_sixteen_bit_grey_image_shows_white() -> None:
    rows = b"\0" + np.array([0x1234, 0x1235], dtype=">u2").tobytes()
    image = read_image(png(2, 1, 16, 0, rows, (b"tRNS", struct.pack(">H", 0x1234))))
    assert pixels(image)[0, :, 0].tolist() == [255, 0x12]


def test_the_key_colour_of_a_sixteen_bit_colour_image_hides_nothing_else() -> None:
    rows = b"\0" + np.array([0x1234] * 3 + [0x1235] * 3, dtype=">u2").tobytes()
    image = read_image(png(2, 1, 16, 2, rows, (b"tRNS", struct.pack(">HHH", 0x1234, 0x1234, 0x1234))))
    assert pixels(image)[0, 1].tolist() == [0x12, 0x12, 0x12]


def test_transparent_parts_show_white() -> None:
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, 3] = [0, 128, 255]
    for data in (
        encode(Image.fromarray(rgba), "PNG"),
        encode(Image.fromarray(rgba), "WEBP", lossless=True, exact=True),
    ):
        assert pixels(read_image(data))[0, :, 0].tolist() == pytest.approx([255, 127, 0], abs=1)


def test_grey_with_alpha_shows_white_where_transparent() -> None:
    la = Image.merge("LA", [Image.new("L", (2, 2), 10), Image.new("L", (2, 2), 0)])
    assert (pixels(read_image(encode(la, "PNG"))) == 255).all()


@pytest.mark.parametrize("transparency", [0, b"\x00\xff"])
def test_a_palette_with_transparency_shows_white(transparency: int | bytes) -> None:
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
def test_a_key_colour_shows_white(mode: str) -> None:
    black = Image.new(mode, (2, 2))
    key = 0 if mode == "L" else (0, 0, 0)
    assert (pixels(read_image(encode(black, "PNG", transparency=key))) == 255).all()


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_of_an_animation_the_first_frame_counts(format: str, options: dict[str, Any]) -> None:
    red, blue = Image.new("RGB", (8, 8), "red"), Image.new("RGB", (8, 8), "blue")
    data = encode(red, format, save_all=True, append_images=[blue], duration=100, **options)
    with Image.open(io.BytesIO(data)) as animation:
        assert getattr(animation, "n_frames", 1) == 2
    assert (pixels(read_image(data)) == [255, 0, 0]).all()


def test_a_jpeg_of_several_pictures_gives_the_first() -> None:
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
def test_the_image_comes_out_upright(format: str, orientation: int, expected: list[list[int]]) -> None:
    stored = np.array([[10, 90, 170], [50, 130, 210]], np.uint8).repeat(16, axis=0).repeat(16, axis=1)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    image = read_image(encode(Image.fromarray(stored).convert("RGB"), format, exif=exif.tobytes()))
    assert np.abs(pixels(image)[8::16, 8::16, 0] - np.array(expected)).max() <= 4
    assert image.getexif().get(ORIENTATION, 1) in (1, orientation if orientation not in range(2, 9) else 1)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("exif", [b"Exif\0\0", b"Exif\0\0MM\0*\0\0\xff\xff", b"Exif\0\0II*\0\x08\0\0\0\x05\0\x12\x01"])
def test_damaged_metadata_does_not_spoil_the_picture(exif: bytes) -> None:
    assert read_image(encode(smooth(64, 48), "JPEG", exif=exif)).size == (64, 48)


# Draft decoding


@pytest.mark.parametrize(
    ("hint", "size"), [(None, (1600, 1200)), (256, (400, 300)), (150, (200, 150)), (2000, (1600, 1200))]
)
def test_a_hint_shrinks_a_jpeg_but_never_below_it(hint: int | None, size: tuple[int, int]) -> None:
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


def test_a_hint_below_one_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="hint"):
        read_image(JPEG, hint=0)


# What is refused


def test_too_many_bytes_are_refused_before_anything_is_read() -> None:
    with pytest.raises(ImageTooLarge, match="bytes"):
        read_image(b"x" * 11, ImageLimits(max_bytes=10))
    assert read_image(PNG, ImageLimits(max_bytes=len(PNG)))


@pytest.mark.parametrize("data", [JPEG, PNG, WEBP])
def test_too_many_pixels_are_refused(data: bytes) -> None:
    assert read_image(data, ImageLimits(max_pixels=64 * 48))
    with pytest.raises(ImageTooLarge, match="64 x 48"):
        read_image(data, ImageLimits(max_pixels=64 * 48 - 1))


def test_a_hint_does_not_get_round_the_pixel_limit() -> None:
    with pytest.raises(ImageTooLarge):
        read_image(encode(smooth(800, 800), "JPEG"), ImageLimits(max_pixels=10_000), hint=10)


@pytest.mark.parametrize("side", [9_000, 12_000, 100_000, 2**31 - 1])
def test_a_bomb_is_refused_by_its_header(side: int) -> None:
    with pytest.raises(ImageTooLarge, match="pixels"):
        read_image(png(side, side, 8, 2, b"\0" * 1000))


def test_a_small_bomb_with_no_rows_is_broken() -> None:
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
def test_another_format_is_unsupported_whatever_its_name_says(format: str) -> None:
    with pytest.raises(UnsupportedImage):
        read_image(encode(smooth(32, 32), format))


@pytest.mark.parametrize("data", [b"", b"hello", b"<svg/>", b"RIFF\0\0\0\0WAVEfmt ", b"\xff\xd8", b"\x89PNG"])
def test_what_is_no_image_is_unsupported(data: bytes) -> None:
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
def test_arbitrary_bytes_only_ever_raise_image_errors(data: bytes, magic: bytes) -> None:
    only_image_errors(magic + data)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", FORMATS)
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_mutated_image_only_ever_raises_image_errors(name: str, data: st.DataObject) -> None:
    mutated = bytearray(FORMATS[name])
    # Most of the structure, and so most of what can go wrong, is near the start.
    places = st.one_of(st.integers(0, min(700, len(mutated) - 1)), st.integers(0, len(mutated) - 1))
    for place, value in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        mutated[place] = value
    only_image_errors(
        bytes(mutated[: data.draw(st.integers(1, len(mutated)))] if data.draw(st.booleans()) else mutated)
    )


def test_threads_read_what_one_thread_reads_and_no_global_setting_changes() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    expected = {name: load_pixels(data, IMAGENET) for name, data in FORMATS.items()}
    with ThreadPoolExecutor(4) as pool:
        jobs = [(name, pool.submit(load_pixels, data, IMAGENET)) for name, data in list(FORMATS.items()) * 4]
        assert all(np.array_equal(job.result(), expected[name]) for name, job in jobs)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


# Preprocessing


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
def test_an_extreme_strip_is_cut_around_its_centre(size: tuple[int, int]) -> None:
    strip = np.zeros((size[1], size[0], 3), np.uint8)
    centre = (size[1] // 2, size[0] // 2)
    reach = 2 * min(size)
    strip[max(0, centre[0] - reach) : centre[0] + reach, max(0, centre[1] - reach) : centre[1] + reach] = 255
    plain = Preprocessing(256, 224, "bicubic", (0, 0, 0), (1, 1, 1))
    assert plain.apply(Image.fromarray(strip)).min() == 1.0
    assert load_pixels(encode(Image.fromarray(strip), "PNG"), plain).shape == (3, 224, 224)


def test_a_strip_just_over_the_limit_looks_like_torchvision_sees_it() -> None:
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
