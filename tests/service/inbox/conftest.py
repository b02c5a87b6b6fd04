"""An empty inbox with a clock that the test sets."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.inbox import Inbox, InboxLimits
from tests.support.inbox import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def inbox(tmp_path: Path, clock: Clock) -> Iterator[Inbox]:
    with contextlib.closing(Inbox(tmp_path, InboxLimits(), clock, wall_clock=clock)) as inbox:
        yield inbox
