"""Broken, huge, foreign and unusual images, made in code, each with the response that it must get."""

from __future__ import annotations

import base64
import io
import random
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

MIB = 2**20


@dataclass(frozen=True)
class ImageCase:
    """Bytes sent as one image. Without a `code` they get an answer."""

    name: str
    status: int
    code: str = ""
    data: bytes = b""


def encode(image: Image.Image, format: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(width: int = 48, height: int = 32, channels: int = 3) -> Image.Image:
    shape = (height, width) if channels == 1 else (height, width, channels)
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8))


def chunk(kind: bytes, body: bytes, crc: int = 0) -> bytes:
    """A PNG chunk; `crc` != 0 corrupts its checksum."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body) ^ crc)


def png(
    width: int = 4, height: int = 4, depth: int = 8, colour: int = 2, rows: bytes | None = None, **parts: Any
) -> bytes:
    """A hand-made PNG. `ihdr` and `idat` corrupt checksums; `method`, `filter`, `lace`, `extra` set the rest."""
    fields = (depth, colour, parts.get("method", 0), parts.get("filter", 0), parts.get("lace", 0))
    header = struct.pack(">II5B", width, height, *fields)
    data = parts.get("data")
    if data is None:
        data = zlib.compress((b"\0" + bytes(3 * width)) * height if rows is None else rows)
    chunks = [chunk(b"IHDR", header, parts.get("ihdr", 0)), *(chunk(*one) for one in parts.get("extra", ()))]
    chunks += [chunk(b"IDAT", data, parts.get("idat", 0)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def jpeg_size(data: bytes, width: int, height: int) -> bytes:
    """The same JPEG with another size in its header."""
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + struct.pack(">HH", height, width) + data[at + 4 :]


def without(data: bytes, marker: bytes) -> bytes:
    """The same JPEG without the first segment of this kind."""
    at = data.index(marker)
    return data[:at] + data[at + 2 + struct.unpack(">H", data[at + 2 : at + 4])[0] :]


def webp_size(data: bytes, width: int, height: int) -> bytes:
    """The same lossless WebP with another size in its header: 14 bits each, after the signature."""
    at = data.index(b"VP8L") + 9
    bits = int.from_bytes(data[at : at + 4], "little") >> 28 << 28 | (height - 1) << 14 | (width - 1)
    return data[:at] + bits.to_bytes(4, "little") + data[at + 4 :]


# The transposition to store, so that applying the EXIF orientation shows the image upright.
_STORED_AS = {
    1: None,
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def oriented(orientation: int, format: str, says: int | None = None, **options: Any) -> bytes:
    """Four colours, stored in one of the eight EXIF orientations; `says` declares another one."""
    colours = np.array([[[250, 10, 10], [10, 240, 20]], [[20, 30, 230], [200, 200, 40]]], np.uint8)
    image = Image.fromarray(np.kron(colours, np.ones((16, 16, 1), np.uint8)))
    turn = _STORED_AS[orientation]
    return encode(image if turn is None else image.transpose(turn), format, exif=_exif(says or orientation), **options)


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


JPEG = encode(noise(), "JPEG", quality=90)
PNG = encode(noise(), "PNG")
WEBP = encode(noise(), "WEBP", quality=90)
FLAT = encode(Image.new("RGB", (16, 16), "red"), "WEBP", lossless=True)
WHOLE = {
    "jpeg": JPEG,
    "progressive jpeg": encode(noise(), "JPEG", quality=90, progressive=True),
    "png": PNG,
    "webp": WEBP,
    "lossless webp": encode(noise(), "WEBP", lossless=True),
}
MAGIC = {"jpeg": 3, "png": 8, "webp": 12}


def truncated() -> Iterator[ImageCase]:
    for name, data in WHOLE.items():
        for percent in (8, 20, 35, 50, 65, 80, 95):
            yield ImageCase(f"{name} cut at {percent} %", 422, "broken_image", data[: len(data) * percent // 100])
    for name, length in MAGIC.items():
        yield ImageCase(f"{name} cut after its magic", 422, "broken_image", WHOLE[name][:length])
        for cut in (1, length - 1):
            yield ImageCase(f"{name} cut to {cut} bytes", 415, "unsupported_image", WHOLE[name][:cut])
    yield ImageCase("png without its last chunk", 200, data=PNG[:-12])  # all pixels are present


def damaged() -> Iterator[ImageCase]:
    zeros = zlib.compress(bytes(8 * MIB))  # 8 kB
    pngs: dict[str, bytes] = {
        "a wrong checksum of the header": png(ihdr=1),
        "a wrong checksum of the data": png(data=bytes(64), idat=1),
        "data that is not zlib": png(data=b"not zlib at all"),
        "data cut short": png(data=zlib.compress(bytes(20))),
        "no data": png()[:33] + chunk(b"IEND", b""),
        "no header": PNG[:8] + PNG[33:],
        "two headers": PNG[:33] + PNG[8:],
        "an unknown row filter": png(rows=b"\x63" + bytes(12), height=1),
        "a depth of 7": png(depth=7),
        "a colour type of 5": png(colour=5),
        "a compression of 1": png(method=1),  # the data is zlib anyway
        "a filter of 9": png(filter=9),
        "a chunk longer than the file": PNG[:33] + struct.pack(">I", 0x7FFFFFFF) + PNG[37:],
        "a negative chunk length": PNG[:33] + struct.pack(">I", 0xFFFFFFF0) + PNG[37:],
        "a chunk name of control bytes": PNG[:37] + b"\0\1\2\3" + PNG[41:],
        "no width": png(width=0),
        "no height": png(height=0),
        "a compressed text of 8 MiB": png(extra=[(b"zTXt", b"k\0\0" + zeros)]),
        "a colour profile of 8 MiB": png(extra=[(b"iCCP", b"k\0\0" + zeros)]),
        "an international text of 8 MiB": png(extra=[(b"iTXt", b"k\0\1\0\0\0" + zeros)]),
        "a header cut short": PNG[:8] + chunk(b"IHDR", bytes(5)) + PNG[33:],
        "a palette image without a palette": png(colour=3, rows=(b"\0" + bytes(4)) * 4),
    }
    # All pixels are present; the reader tolerates the rest.
    readable = {"two headers", "a compression of 1", "a chunk longer than the file", "a negative chunk length"}
    for name, data in pngs.items():
        status, code = (200, "") if name in readable else (422, "broken_image")
        yield ImageCase(f"png with {name}", status, code, data)
    scan = JPEG.index(b"\xff\xda")
    jpegs = {
        "no width": jpeg_size(JPEG, 0, 32),
        "no height": jpeg_size(JPEG, 48, 0),
        "no quantisation": without(without(JPEG, b"\xff\xdb"), b"\xff\xdb"),
        "no frame": without(JPEG, b"\xff\xc0"),
        "no scan": JPEG[:scan] + b"\xff\xd9",
        "a segment longer than the file": JPEG[:2] + b"\xff\xe0\xff\xff" + JPEG[2:],
        "two components": JPEG.replace(b"\xff\xc0\0\x11\x08", b"\xff\xc0\0\x11\x10"),
        "nothing but markers": b"\xff\xd8" + b"\xff\xff" * 500,
    }
    for name, data in jpegs.items():
        yield ImageCase(f"jpeg with {name}", 422, "broken_image", data)
    webps = {
        "a size beyond its end": WEBP[:4] + struct.pack("<I", 10**9) + WEBP[8:],
        "a size of 0": WEBP[:4] + bytes(4) + WEBP[8:],
        "an unknown chunk only": b"RIFF" + struct.pack("<I", 16) + b"WEBPABCD" + struct.pack("<I", 4) + b"1234",
        "a corrupt frame tag": WEBP[:20] + b"\xff" * 12 + WEBP[32:],
    }
    for name, data in webps.items():
        yield ImageCase(f"webp with {name}", 422, "broken_image", data)


def bombs() -> Iterator[ImageCase]:
    row = b"\0" + bytes(1000)  # 8000 pixels of one bit
    declared = {
        "png of 60000 x 60000 and little data": png(60000, 60000, data=zlib.compress(bytes(1000))),
        "png of one colour, 56 million pixels": png(8000, 7000, 1, 0, row * 7000),
        "png of 2147483647 x 1": png(2**31 - 1, 1, data=b""),
        "png of 4294967295 x 4294967295": png(2**32 - 1, 2**32 - 1, data=b""),
        "jpeg of 65500 x 65500": jpeg_size(JPEG, 65500, 65500),
        "jpeg of 65535 x 1000": jpeg_size(JPEG, 65535, 1000),
        "webp of 16383 x 16383": webp_size(FLAT, 16383, 16383),
        "webp with a canvas of 16384 x 16384": b"RIFF"
        + struct.pack("<I", len(WEBP) + 10)
        + b"WEBPVP8X"
        + struct.pack("<I", 10)
        + bytes(4)
        + b"\xff\x3f\0" * 2
        + WEBP[12:],
    }
    for name, data in declared.items():
        yield ImageCase(name, 413, "image_too_large", data)
    yield ImageCase("png of one colour, 48 million pixels", 200, data=png(8000, 6000, 1, 0, row * 6000))


def foreign_formats() -> Iterator[ImageCase]:
    rgb, small = noise(), Image.new("P", (4, 4))
    texts = {
        "svg": b'<svg xmlns="http://www.w3.org/2000/svg"><rect/></svg>',
        "html": b"<!DOCTYPE html><html><body>404</body></html>",
        "pdf": b"%PDF-1.7\n%\xe2\xe3\xcf\xd3\n1 0 obj\n",
        "plain text": b"this is not an image",
        "json": b'{"images": []}',
        "zip": b"PK\x03\x04" + bytes(26),
        "gzip": b"\x1f\x8b\x08" + bytes(20),
        "avif": b"\0\0\0\x1cftypavif" + bytes(20),
        "heic": b"\0\0\0\x1cftypheic" + bytes(20),
        "mp4": b"\0\0\0\x1cftypisom" + bytes(20),
        "jpeg xl": b"\xff\x0a" + bytes(20),
        "psd": b"8BPS\0\1" + bytes(20),
        "elf": b"\x7fELF\2\1\1" + bytes(20),
        "wave": b"RIFF\x24\0\0\0WAVEfmt ",
        "zeros": bytes(1000),
        "spaces": b" " * 1000,
        "random bytes": b"\0" + random.Random(0).randbytes(5000),
        "jpeg after a byte": b"\0" + JPEG,
        "png after a newline": b"\n" + PNG,
        "png in base64": base64.b64encode(PNG),
        "png with unix line ends": PNG.replace(b"\r\n", b"\n", 1),
        "jpeg cut at its front": JPEG[2:],
        "one byte": b"x",
    }
    images = {
        "gif": encode(small, "GIF"),
        "animated gif": encode(small, "GIF", save_all=True, append_images=[Image.new("P", (4, 4), 1)]),
        "bmp": encode(rgb, "BMP"),
        "tiff": encode(rgb, "TIFF"),
        "big-endian tiff": encode(Image.new("I;16B", (4, 4)), "TIFF"),
        "ico": encode(Image.new("RGBA", (16, 16)), "ICO"),
        "ppm": encode(rgb, "PPM"),
        "tga": encode(rgb, "TGA"),
        "eps": encode(rgb, "EPS"),
    }
    for name, data in (texts | images).items():
        yield ImageCase(name, 415, "unsupported_image", data)
    yield ImageCase("nothing", 415, "unsupported_image")


def odd() -> Iterator[ImageCase]:
    """Unusual but valid images."""
    rgb, grey, rgba = noise(), noise(channels=1), noise(channels=4)
    palette = Image.new("P", (8, 8))
    palette.putpalette([200, 0, 0, 0, 0, 200])
    deep = np.random.default_rng(0).integers(0, 65536, (8, 8), dtype=np.uint16)
    frames: dict[str, Any] = {"save_all": True, "append_images": [noise().rotate(90)], "duration": 100}
    images = {
        "cmyk jpeg": encode(rgb.convert("CMYK"), "JPEG"),
        "grey jpeg": encode(grey, "JPEG"),
        "grey png": encode(grey, "PNG"),
        "one-bit png": encode(grey.convert("1"), "PNG"),
        "grey png with alpha": encode(rgba.convert("LA"), "PNG"),
        "png with alpha": encode(rgba, "PNG"),
        "webp with alpha": encode(rgba, "WEBP"),
        "sixteen-bit grey png": encode(Image.fromarray(deep), "PNG"),
        "sixteen-bit colour png": png(4, 4, 16, 2, (b"\0" + bytes(range(24))) * 4),
        "interlaced png": png(1, 1, lace=1),
        "palette png": encode(palette, "PNG"),
        "palette png with a transparent colour": encode(palette, "PNG", transparency=0),
        "palette png with many transparencies": encode(palette, "PNG", transparency=b"\x80\xff"),
        "animated png": encode(rgb, "PNG", **frames),
        "animated webp": encode(rgb, "WEBP", **frames),
        "jpeg of several images": encode(rgb, "MPO", save_all=True, append_images=[noise()]),
        "jpeg with a corrupt exif": encode(rgb, "JPEG", exif=b"Exif\0\0MM\0*" + b"\xff" * 40),
        "jpeg with a corrupt colour profile": encode(rgb, "JPEG", icc_profile=b"no profile"),
        "jpeg with an orientation of 99": encode(rgb, "JPEG", exif=_exif(99)),
        "jpeg with something after its end": JPEG + bytes(1000),
        "png with something after its end": PNG + b"<script>",
        "webp with something after its end": WEBP + bytes(1000),
    }
    for format in ("JPEG", "PNG", "WEBP"):
        images[f"{format} of 1 x 1"] = encode(Image.new("RGB", (1, 1), "red"), format)
    for format in ("JPEG", "PNG"):
        images[f"{format} of 1 x 20000"] = encode(Image.new("RGB", (1, 20000), "red"), format)
        images[f"{format} of 20000 x 1"] = encode(Image.new("RGB", (20000, 1), "red"), format)
    for orientation in range(1, 9):
        images[f"png with orientation {orientation}"] = oriented(orientation, "PNG")
        images[f"jpeg with orientation {orientation}"] = oriented(orientation, "JPEG", quality=95, subsampling=0)
    for name, data in images.items():
        yield ImageCase(name, 200, data=data)


def all_images() -> Iterator[ImageCase]:
    for group in (truncated, damaged, bombs, foreign_formats, odd):
        yield from group()
