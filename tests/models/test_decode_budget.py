"""The memory of decoded images is limited over all threads, and an error keeps none of it."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import psutil  # type: ignore[import-untyped]
import pytest

from models.errors import BrokenImage, ImageTooLarge, LargeImage
from models.images import DECODED_PIXEL_BYTES, LARGE_PIXELS, DecodeBudget, ImageLimits, open_image
from tests.support.bad_images import png
from tests.support.encoded_images import encode, smooth


def limits_for(pixels: int) -> ImageLimits:
    return ImageLimits(budget=DecodeBudget(pixels * DECODED_PIXEL_BYTES))


def test_images_are_decoded_together_only_if_they_fit() -> None:
    limits, image = limits_for(250), encode(smooth(10, 10), "PNG")
    most = running = 0
    lock, two_inside = threading.Lock(), threading.Barrier(2)

    def decode(_: int) -> None:
        nonlocal most, running
        with open_image(image, limits):
            with lock:
                running += 1
                most = max(most, running)
            two_inside.wait(60)  # two images fit, so two threads meet here
            with lock:
                running -= 1

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(decode, range(6)))
    assert most == 2


def test_an_image_larger_than_the_budget_is_refused() -> None:
    image = encode(smooth(10, 11), "PNG")
    with pytest.raises(ImageTooLarge, match="memory"), open_image(image, limits_for(100)):
        pass
    with open_image(image, limits_for(110)):
        pass


def test_the_reservation_ends_with_an_error() -> None:
    limits, image = limits_for(100), encode(smooth(10, 10), "PNG")
    for _ in range(3):
        with pytest.raises(BrokenImage), open_image(image[:60], limits):
            pass
        with pytest.raises(ZeroDivisionError), open_image(image, limits):
            raise ZeroDivisionError


def test_the_error_of_a_damaged_image_does_not_keep_its_pixels() -> None:
    cut = png(4000, 4000)[:-1000]  # 64 MB when decoded
    errors, process = list[BrokenImage](), psutil.Process()
    before = process.memory_info().rss
    for _ in range(6):
        with pytest.raises(BrokenImage) as found, open_image(cut):
            pass
        errors.append(found.value)
    assert process.memory_info().rss - before < 150e6


def test_small_only_refuses_what_takes_long_to_decode() -> None:
    side = int(LARGE_PIXELS**0.5)
    with open_image(png(side, side), small_only=True):
        pass
    with pytest.raises(LargeImage), open_image(png(side + 1, side), small_only=True):
        pass
    # A JPEG is decoded at a reduced size, which takes less time.
    photo = encode(smooth(side * 2, side * 2), "JPEG")
    with open_image(photo, hint=64, small_only=True):
        pass
    with pytest.raises(LargeImage), open_image(photo, small_only=True):
        pass
