"""Wait for a condition, without a fixed sleep."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], seconds: float = 20, pause: float = 0.02) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"condition not met within {seconds:g} s"
        time.sleep(pause)
