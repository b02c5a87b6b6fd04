"""The tests that need Redis with sentinels."""

from __future__ import annotations

import pytest

from deploy.fleet.programs import find_program

needs_sentinel = pytest.mark.skipif(
    not (find_program("redis-server") and find_program("redis-sentinel")),
    reason="needs redis-server and redis-sentinel: `make system` installs them on Debian",
)
