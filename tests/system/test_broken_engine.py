"""A server whose engine fails persistently is not ready, and recovers by itself."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx

from tests.support.learning_loop import loop
from tests.support.servers import known_image, wait_until


def test_a_server_that_computes_no_answers_is_not_ready_until_it_does_again(tmp_path: Path) -> None:
    switch = tmp_path / "broken"
    with loop(tmp_path) as running:
        running.settings["BROKEN_ENGINE"] = str(switch)
        running.start("serve")
        with httpx.Client(base_url=running.url, timeout=20) as http:

            def predict() -> int:
                return http.post("/predict", content=known_image("class 0")).status_code

            assert predict() == 200
            switch.touch()
            assert predict() == 500
            assert http.get("/readyz").status_code == 200  # one failure may be the fault of its batch
            assert {predict() for _ in range(2)} == {500}
            wait_until(lambda: http.get("/readyz").status_code == 503)
            refused = http.get("/readyz").json()
            assert (refused["code"], refused["detail"]) == (
                "not_ready",
                "version 3 computes no answers: the device is lost",
            )
            assert "openworld_ready 0.0" in http.get("/metrics").text
            assert "openworld_engine_failures_total 3.0" in http.get("/metrics").text
            assert http.get("/livez").status_code == 200
            switch.unlink()
            # Without another request. The pauses between probes have grown in the meantime.
            wait_until(lambda: http.get("/readyz").status_code == 200, 60)
            assert predict() == 200
