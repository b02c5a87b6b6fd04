"""The priority of threads: work that is large or can wait runs after the threads that answer requests."""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress

NICE = 10


def lower_priority() -> None:
    """Lower the priority of the calling thread, on Linux; elsewhere a process has one priority for all threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
