"""/classes: edits over HTTP."""

from __future__ import annotations

from pathlib import Path

import httpx2 as httpx

from tests.support.servers import known_image, learned_folder, running_server


def test_edits_of_classes_are_served_at_once(tmp_path: Path) -> None:
    with running_server(learned_folder(tmp_path / "robot"), poll_seconds=60) as server:

        def patch(name: str, **change: object) -> httpx.Response:
            return httpx.patch(f"{server.url}/classes/{name}", json=change, timeout=30)

        listed = server.get("/classes").json()
        assert [entry["name"] for entry in listed["classes"]] == [f"class {n}" for n in range(5)]
        assert patch("class 0", rename="apple").json()["version"] == 4
        labels = [
            server.post("/predict", content=known_image("class 0", n)).json()["predictions"][0]["label"]
            for n in range(9)
        ]
        assert "apple" in labels
        assert patch("class 1", merge_into="apple").status_code == 200
        assert patch("class 2", retired=True).status_code == 200
        states = {entry["name"]: entry["state"] for entry in server.get("/classes").json()["classes"]}
        assert (states["apple"], states["class 1"], states["class 2"]) == ("active", "merged", "retired")
        assert patch("class 2", retired=False).status_code == 200
        for name, change, status, code in (
            ("unknown", {"retired": True}, 404, "unknown_class"),
            ("apple", {"rename": "class 3"}, 409, "class_conflict"),
            ("apple", {"rename": "CLASS 3"}, 422, "invalid_name"),
            ("apple", {"rename": "../x"}, 422, "invalid_name"),
            ("apple", {"merge_into": "apple"}, 409, "class_conflict"),
            ("apple", {}, 422, "invalid"),
            ("apple", {"rename": "x", "retired": True}, 422, "invalid"),
        ):
            response = patch(name, **change)  # type: ignore[arg-type]
            assert (response.status_code, response.json()["code"]) == (status, code), response.text
        assert server.get("/versions").json()["history"][-1]["reason"] == "anonymous: restored class 2"
        assert server.post("/versions/3/activate").status_code == 200
        assert server.get("/classes").json()["classes"][0]["name"] == "class 0"
