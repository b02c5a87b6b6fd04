"""A clock that is set while the service is off, as on a board without a battery, loses nothing."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from openworld.check import check_folder
from tests.support.servers import learned_folder, novel_image, running_server
from tests.support.waiting import wait_until

DAYS = 31  # more than the inbox keeps an image


@pytest.mark.parametrize("jump", [DAYS, -DAYS])
def test_the_inbox_is_kept(tmp_path: Path, jump: int) -> None:
    data = learned_folder(tmp_path / "robot")
    with running_server(data, tmp_path / "before.log") as server:
        server.post("/predict", content=novel_image(1))
        wait_until(lambda: server.get("/novelties").json()["items"])
    # The same as a clock that differs by `jump` days at the next start.
    with closing(sqlite3.connect(data / "inbox" / "inbox.sqlite3")) as database, database:
        database.execute(
            "UPDATE novelties SET first_seen = first_seen - :s, last_seen = last_seen - :s", {"s": jump * 86400}
        )
    with running_server(data, tmp_path / "after.log") as server:
        server.post("/predict", content=novel_image(2))
        wait_until(lambda: len(server.get("/novelties").json()["items"]) == 2)
        assert check_folder(data, None).problems == []
