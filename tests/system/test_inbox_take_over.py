"""Rolling replacement: a server that starts while another one has the inbox takes it over when that one ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from openworld.check import check_folder
from tests.support.servers import learned_folder, novel_image, running_server
from tests.support.waiting import wait_until

PNG = {"Content-Type": "image/png"}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_the_inbox_moves_to_the_next_server_within_seconds(tmp_path: Path, how: signal.Signals) -> None:
    data = learned_folder(tmp_path / "robot")
    with (
        running_server(data, tmp_path / "first.log") as first,
        running_server(data, tmp_path / "second.log") as second,
    ):
        first.post("/predict", content=novel_image(1), headers=PNG)
        wait_until(lambda: first.get("/novelties").json()["items"])
        assert second.get("/novelties").status_code == 404
        assert second.metric("openworld_inbox_missing") == 1
        second.post("/predict", content=novel_image(2), headers=PNG)
        assert second.metric("openworld_novelties_dropped_total", reason="no_inbox") == 1

        first.stop(how)
        wait_until(lambda: second.get("/novelties").status_code == 200)
        assert len(second.get("/novelties").json()["items"]) == 1
        assert second.metric("openworld_inbox_missing") == 0
        second.post("/predict", content=novel_image(3), headers=PNG)
        wait_until(lambda: len(second.get("/novelties").json()["items"]) == 2)
        assert check_folder(data, None).problems == []
