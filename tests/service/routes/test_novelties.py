"""The inbox over HTTP, on a real server."""

from __future__ import annotations

import contextlib
import io
import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from models.files import sha256_bytes
from service.inbox import Inbox
from tests.support.images import make_image
from tests.support.inbox import clusters, sighting
from tests.support.novelties import add_novelty, block_image, list_novelties, predict, problem_of
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server, wait_until

KEYS = {role: f"the-secret-to-{role}-with" for role in ("predict", "label", "operate")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("novelties") / "robot")
    with running_server(data, threads=1, inbox_rate=1000) as running:
        yield running


def novel_answers(server: RunningServer) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Images whose answer is novel, with the answers."""
    for number in range(1000, 2000):
        data = novel_image(number)
        answer = predict(server, data)
        if answer["novel"]:
            yield data, answer


# Lists


def test_a_novel_image_is_in_the_inbox_with_its_answer_and_bytes(server: RunningServer) -> None:
    data, answer = next(novel_answers(server))
    id = sha256_bytes(data)
    wait_until(lambda: server.get(f"/novelties/{id}").status_code == 200)
    item = server.get(f"/novelties/{id}").json()
    assert (item["state"], item["count"], item["client"], item["label"], item["note"]) == (
        *("new", 1, "anonymous"),
        *(None, None),
    )
    assert item["prediction_id"] == answer["id"]
    assert {name: item[name] for name in ("version", "score", "p_novel", "calibrated_score", "nearest")} == {
        name: answer[name] for name in ("version", "score", "p_novel", "calibrated_score", "nearest")
    }
    assert (item["bytes"], item["width"], item["height"]) == (len(data), 8, 8)
    assert datetime.now(UTC) - datetime.fromisoformat(item["last_seen"]) < timedelta(minutes=5)
    assert server.get(f"/novelties/{id}/image").content == data
    assert item in list_novelties(server)


def test_a_novelty_shows_the_present_label_of_a_renamed_class(tmp_path: Path) -> None:
    with running_server(learned_folder(tmp_path / "robot"), threads=1, inbox_rate=1000) as server:
        id = sha256_bytes(next(novel_answers(server))[0])
        wait_until(lambda: server.get(f"/novelties/{id}").status_code == 200)
        before = server.get(f"/novelties/{id}").json()["nearest"]
        old = before[0]["label"]
        httpx.patch(f"{server.url}/classes/{old}", json={"rename": "margherita"}, timeout=30).raise_for_status()
        expected = [{"label": "margherita", "share": before[0]["share"]}, *before[1:]]
        (group,) = server.get("/novelties/groups").json()["items"]
        (listed,) = list_novelties(server)
        for item in (server.get(f"/novelties/{id}").json(), listed, group["samples"][0]):
            assert (item["nearest"], item["version"]) == (expected, 3)


def test_pages_list_every_novelty_once_last_seen_first(server: RunningServer) -> None:
    added = [add_novelty(server, block_image(number)) for number in range(7)]
    items = list_novelties(server, limit=3)
    ids = [item["id"] for item in items]
    assert len(ids) == len(set(ids))
    assert [id for id in ids if id in added] == added[::-1]
    assert [item["last_seen"] for item in items] == sorted((item["last_seen"] for item in items), reverse=True)


def test_filters_list_only_matching_novelties(server: RunningServer) -> None:
    before = datetime.now(UTC)
    old = add_novelty(server, block_image(100), version=2)
    new = add_novelty(server, block_image(101))
    by_version = {item["id"]: item["version"] for item in list_novelties(server, version=2)}
    assert old in by_version
    assert set(by_version.values()) == {2}
    assert {item["id"] for item in list_novelties(server, since=before.isoformat())} == {old, new}
    assert {item["id"] for item in list_novelties(server, since=before.isoformat(), version=3, limit=1)} == {new}
    assert list_novelties(server, since=(before + timedelta(hours=1)).isoformat()) == []
    assert list_novelties(server, client="unknown") == []
    assert len(list_novelties(server, client="anonymous")) == len(list_novelties(server))
    group = server.get(f"/novelties/{new}").json()["group"]
    members = list_novelties(server, group=group)
    assert new in {item["id"] for item in members}
    assert {item["group"] for item in members} == {group}
    assert list_novelties(server, group="unknown") == []


@pytest.mark.parametrize(
    "query",
    [
        *("state=old", "limit=0", "limit=201", "before=-1", "before=x", "version=-1"),
        *("since=yesterday", "since=2025-01-01T00:00:00"),
    ],
)
def test_an_invalid_filter_is_refused(server: RunningServer, query: str) -> None:
    assert problem_of(server.get(f"/novelties?{query}")) == (422, "invalid")


def test_groups_contain_every_novelty_once(server: RunningServer) -> None:
    for number in range(200, 206):
        add_novelty(server, block_image(number))
    groups: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = server.get("/novelties/groups", params=query).json()
        groups += page["items"]
        if page["next_cursor"] is None:
            break
        query["before"] = page["next_cursor"]
    ids = [id for group in groups for id in group["ids"]]
    assert sorted(ids) == sorted(item["id"] for item in list_novelties(server))
    assert [group["size"] for group in groups] == sorted((len(group["ids"]) for group in groups), reverse=True)
    for group in groups:
        assert [sample["id"] for sample in group["samples"]] == group["ids"][:8]
        assert {sample["group"] for sample in group["samples"]} == {group["id"]}
        assert [item["id"] for item in list_novelties(server, group=group["id"])] == group["ids"]
    newest = server.get("/novelties/groups?order=newest").json()["items"]
    times = [group["newest_seen"] for group in newest]
    assert times == sorted(times, reverse=True)
    assert problem_of(server.get("/novelties/groups?before=7")) == (422, "invalid")
    assert problem_of(server.get("/novelties/groups?order=random")) == (422, "invalid")


# Changes


def test_novelties_are_dismissed_and_restored(server: RunningServer) -> None:
    one, other = (add_novelty(server, block_image(number)) for number in (400, 401))
    body = {"ids": [one, other, "0" * 64]}
    assert server.post("/novelties/dismiss", json=body).json() == {
        "changed": [one, other],
        "missing": ["0" * 64],
    }
    assert server.post("/novelties/dismiss", json={"ids": [one]}).json() == {"changed": [], "missing": []}
    assert {one, other} <= {item["id"] for item in list_novelties(server, state="dismissed")}
    assert not {one, other} & {item["id"] for item in list_novelties(server)}
    assert server.get(f"/novelties/{one}").json()["state"] == "dismissed"
    assert server.post("/novelties/restore", json={"ids": [one]}).json() == {"changed": [one], "missing": []}
    assert one in {item["id"] for item in list_novelties(server)}
    assert server.metric("openworld_novelties", state="dismissed") == 1


def test_a_deleted_novelty_is_removed_with_its_image(server: RunningServer) -> None:
    data = next(image for image in map(block_image, range(4100, 4200)) if predict(server, image)["novel"])
    id = sha256_bytes(data)
    prediction = predict(server, data)["id"]
    path = server.log.parent / "robot" / "inbox" / "images" / id[:2] / id
    wait_until(lambda: server.get(f"/novelties/{id}").json()["count"] == 2)
    assert path.read_bytes() == data
    assert httpx.delete(f"{server.url}/novelties/{id}", timeout=30).status_code == 204
    assert not path.exists()
    for name in ("", "/image", "/thumbnail"):
        assert problem_of(server.get(f"/novelties/{id}{name}")) == (404, "not_found")
    # Its prediction is removed as well.
    assert problem_of(server.post("/novelties", json={"prediction_ids": [prediction]})) == (404, "not_found")


def test_a_prediction_reported_as_wrong_goes_into_the_inbox(server: RunningServer) -> None:
    answers = [(data, predict(server, data)) for data in (known_image(f"class {c}", 700 + c) for c in range(5))]
    data, answer = next(pair for pair in answers if not pair[1]["novel"])
    id = sha256_bytes(data)
    assert problem_of(server.get(f"/novelties/{id}")) == (404, "not_found")
    body = {"prediction_ids": [answer["id"], "never-given"], "note": "a quince"}
    assert server.post("/novelties", json=body).json() == {
        "kept": [{"prediction_id": answer["id"], "novelty_id": id, "outcome": "new", "reason": None}],
        "missing": ["never-given"],
    }
    item = server.get(f"/novelties/{id}").json()
    assert (item["state"], item["label"], item["note"]) == ("new", answer["label"], "a quince")
    assert item["prediction_id"] == answer["id"]
    assert item["group"]
    assert server.get(f"/novelties/{id}/image").content == data
    # Reported again, it is new again and keeps its note.
    server.post("/novelties/dismiss", json={"ids": [id]})
    again = server.post("/novelties", json={"prediction_ids": [answer["id"]]}).json()["kept"][0]
    assert (again["novelty_id"], again["outcome"]) == (id, "folded")
    item = server.get(f"/novelties/{id}").json()
    assert (item["state"], item["count"], item["note"]) == ("new", 2, "a quince")


def test_unknown_ids_are_404(server: RunningServer) -> None:
    for id in ("0" * 64, "x", "..%2f..%2fCURRENT", "%00", "a" * 128):
        for name in ("", "/image", "/thumbnail"):
            assert problem_of(server.get(f"/novelties/{id}{name}")) == (404, "not_found")
        assert problem_of(httpx.delete(f"{server.url}/novelties/{id}", timeout=30)) == (404, "not_found")
    for path in ("dismiss", "restore"):
        assert problem_of(server.post(f"/novelties/{path}", json={"ids": ["0" * 64]})) == (404, "not_found")
        assert problem_of(server.post(f"/novelties/{path}", json={"ids": ["../x"]})) == (422, "invalid")
        assert problem_of(server.post(f"/novelties/{path}", json={"ids": []})) == (422, "invalid")
    assert problem_of(server.post("/novelties", json={"prediction_ids": ["unknown"]})) == (404, "not_found")
    assert problem_of(server.post("/novelties", json={"prediction_ids": []})) == (422, "invalid")
    assert problem_of(server.post("/novelties", json={"prediction_ids": ["\0"]})) == (422, "invalid")


def test_the_inbox_and_thumbnails_need_the_role_label_and_stored_images_the_role_operate(tmp_path: Path) -> None:
    keys = ",".join(f"{role}:{role}:{secret}" for role, secret in KEYS.items())
    sha = "0" * 64
    inbox_routes = [
        *(("GET", path) for path in ("/novelties", "/novelties/groups", f"/novelties/{sha}")),
        *(("GET", f"/novelties/{sha}/image"), ("GET", f"/novelties/{sha}/thumbnail"), ("DELETE", f"/novelties/{sha}")),
        *(("POST", "/novelties/dismiss"), ("POST", "/novelties/restore"), ("POST", "/novelties")),
        ("GET", f"/images/{sha}/thumbnail"),
    ]
    image_routes = [
        *(("GET", f"/images/{sha}"), ("DELETE", f"/images/{sha}")),
        *(("GET", "/images/expired?older_than_days=30"), ("DELETE", "/images?older_than_days=30&confirm=true")),
    ]
    with running_server(learned_folder(tmp_path / "robot"), threads=1, keys=keys, inbox="false") as server:

        def ask(method: str, path: str, role: str | None) -> int:
            headers = {"Authorization": f"Bearer {KEYS[role]}"} if role else {}
            body = {"ids": [sha]} if path.endswith(("dismiss", "restore")) else {"prediction_ids": ["x"]}
            arguments: dict[str, Any] = {"json": body} if method == "POST" else {}
            return httpx.request(method, server.url + path, headers=headers, timeout=30, **arguments).status_code

        for routes, role in ((inbox_routes, "label"), (image_routes, "operate")):
            for route in routes:
                assert ask(*route, None) == 401, route
                for other in set(KEYS) - {role}:
                    assert ask(*route, other) == 403, route
        # Without an inbox, its routes are 404.
        assert {ask(*route, "label") for route in inbox_routes} == {404}
        assert [ask(*route, "operate") for route in image_routes] == [404, 404, 200, 200]


# A full inbox


def full_inbox(root: Path, count: int = 5000) -> None:
    """Fill the inbox to its limit, with about six hundred groups; `add` would be slow."""
    with contextlib.closing(Inbox(root)) as inbox:
        inbox.add(sighting(make_image(0)))
    path = root / "inbox" / "inbox.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM novelties").fetchone())
        rows, image = [], io.BytesIO(make_image(0))
        for number, (_, vector) in enumerate(clusters(300, -(-count // 300), 1280, 0.8)[: count - 1], start=2):
            data = image.getvalue() + number.to_bytes(4, "big")
            id = sha256_bytes(data)
            (root / "inbox" / "images" / id[:2]).mkdir(exist_ok=True)
            (root / "inbox" / "images" / id[:2] / id).write_bytes(data)
            rows.append(row | {"id": id, "seen": number, "embedding": vector.astype("<f2").tobytes()})
        names = list(row)
        marks = ", ".join(f":{name}" for name in names)
        connection.executemany(f"INSERT INTO novelties ({', '.join(names)}) VALUES ({marks})", rows)


def test_five_thousand_novelties_are_listed_and_grouped(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    full_inbox(data)
    with running_server(data, threads=1) as server:
        for path in (
            *("/novelties?limit=200", "/novelties?limit=200&before=2500", "/novelties/groups?limit=50"),
            *("/novelties/groups?limit=50&order=newest", "/novelties/groups?limit=200&before=9.9999"),
        ):
            response = server.get(path)
            least = 100 if "groups?limit=200" in path else 200 if "limit=200" in path else 50
            assert len(response.json()["items"]) >= least
        group = server.get("/novelties/groups?limit=1").json()["items"][0]
        assert len(server.get("/novelties", params={"group": group["id"]}).json()["items"]) == group["size"]
