"""GET /me: the name and the roles of a key."""

from __future__ import annotations

from pathlib import Path

from tests.support.servers import learned_folder, running_server

SECRET = "llllllll-secret-of-a-labeller"


def test_without_keys_every_request_has_every_role(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server:
        assert server.get("/me").json() == {
            "keys_needed": False,
            "name": "anonymous",
            "roles": ["label", "monitor", "operate", "predict"],
            "keep": "images",
        }


def test_with_keys_it_names_the_key_and_an_unknown_key_learns_nothing(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    with running_server(data, threads=1, keys=f"anna:predict+label:{SECRET}") as server:
        known = server.get("/me", headers={"Authorization": f"Bearer {SECRET}"})
        assert known.json() == {
            "keys_needed": True,
            "name": "anna",
            "roles": ["label", "predict"],
            "keep": "images",
        }
        for headers in ({}, {"Authorization": f"Bearer {SECRET}x"}):
            refused = server.get("/me", headers=headers)
            assert (refused.status_code, refused.json()["code"]) == (401, "unauthorized")
            assert "anna" not in refused.text
