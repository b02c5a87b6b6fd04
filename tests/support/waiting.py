"""Wait for a condition, without a fixed sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], seconds: float = 20, pause: float = 0.02) -> T:
    """What the condition returned when it was met."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, f"condition not met within {seconds:g} s"
        time.sleep(pause)
    return found
