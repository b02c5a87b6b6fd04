"""How the process returns memory to the system."""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

LARGE_BLOCK = 4 * 2**20  # bytes: pixels of large images, not those of usual ones
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt


def return_large_blocks() -> None:
    """Let glibc return every freed block of this size at once, instead of keeping it for the thread that freed it.

    Otherwise, each thread that has decoded a large image keeps its memory, and together they exceed any budget.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            mallopt = ctypes.CDLL(None).mallopt
            mallopt(_MMAP_THRESHOLD, LARGE_BLOCK)
            mallopt(_TRIM_THRESHOLD, 2 * LARGE_BLOCK)
