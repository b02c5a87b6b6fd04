from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.browsers import chromium
from tests.support.learning_loop import Loop, loop


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, browser: Any) -> Iterator[Loop]:
    """Server, queue and a trainer that is slowed down, so that progress can be observed."""
    with pytest.MonkeyPatch.context() as patch, loop(tmp_path_factory.mktemp("console"), inbox_rate="1000") as running:
        running.start("serve")
        patch.setenv("SLOW", "0.3")
        running.start("train")
        yield running
