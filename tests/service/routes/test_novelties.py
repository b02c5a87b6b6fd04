"""The novelty inbox over HTTP, on a real server: what robots sent is there for people, and only for them."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
from PIL import ExifTags, Image, PngImagePlugin

from models.files import sha256_bytes
from service.inbox import Inbox
from tests.service.inbox.test_groups import clusters
from tests.service.inbox.test_inbox import sighting
from tests.support.images import make_image
from tests.support.servers import (
    RunningServer,
    known_image,
    learned_folder,
    novel_image,
    running_server,
    wait_until,
)

KEYS = {role: f"the-secret-to-{role}-with" for role in ("predict", "label", "operate")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("novelties") / "robot")
    with running_server(data, threads=1, inbox_rate=1000) as running:
        yield running


def predict(server: RunningServer, data: bytes, **query: object) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/predict", content=data, params=query).json()["predictions"][0]
    return answer


def strange(number: int, size: tuple[int, int] = (48, 36), **options: Any) -> bytes:
    """A picture like no other: of noise in large blocks, which no fold and no re-encoding changes much."""
    blocks = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(blocks).resize(size, Image.Resampling.NEAREST).save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


def arrive(server: RunningServer, data: bytes, **query: object) -> str:
    """Have an image in the inbox, as a robot does, or by a person's word where the model happens to know it."""
    answer, id = predict(server, data, **query), sha256_bytes(data)
    if not answer["novel"]:
        assert server.post("/novelties", json={"prediction_ids": [answer["id"]]}).status_code == 200
    wait_until(lambda: server.get(f"/novelties/{id}").status_code == 200)
    return id


def listed(server: RunningServer, **query: object) -> list[dict[str, Any]]:
    """Every page of it."""
    items: list[dict[str, Any]] = []
    while True:
        page = server.get("/novelties", params=query).json()
        items += page["items"]
        if page["next_cursor"] is None:
            return items
        query["before"] = page["next_cursor"]


def problem(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["code"]


def unseen_by_model(server: RunningServer) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Pictures that are answered `novel`, with the answers."""
    for number in range(1000, 2000):
        data = novel_image(number)
        answer = predict(server, data)
        if answer["novel"]:
            yield data, answer


# Looking


def test_a_novel_image_arrives_with_its_answer_and_its_very_bytes(server: RunningServer) -> None:
    data, answer = next(unseen_by_model(server))
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
    assert item in listed(server)


def test_pages_show_everything_once_last_seen_first(server: RunningServer) -> None:
    added = [arrive(server, strange(number)) for number in range(7)]
    items = listed(server, limit=3)
    ids = [item["id"] for item in items]
    assert len(ids) == len(set(ids))
    assert [id for id in ids if id in added] == added[::-1]
    assert [item["last_seen"] for item in items] == sorted((item["last_seen"] for item in items), reverse=True)


def test_filters_show_only_what_they_say(server: RunningServer) -> None:
    before = datetime.now(UTC)
    old = arrive(server, strange(100), version=2)
    new = arrive(server, strange(101))
    by_version = {item["id"]: item["version"] for item in listed(server, version=2)}
    assert old in by_version
    assert set(by_version.values()) == {2}
    assert {item["id"] for item in listed(server, since=before.isoformat())} == {old, new}
    assert {item["id"] for item in listed(server, since=before.isoformat(), version=3, limit=1)} == {new}
    assert listed(server, since=(before + timedelta(hours=1)).isoformat()) == []
    assert listed(server, client="nobody") == []
    assert len(listed(server, client="anonymous")) == len(listed(server))
    group = server.get(f"/novelties/{new}").json()["group"]
    members = listed(server, group=group)
    assert new in {item["id"] for item in members}
    assert {item["group"] for item in members} == {group}
    assert listed(server, group="nobody") == []


@pytest.mark.parametrize(
    "query",
    [
        *("state=old", "limit=0", "limit=201", "before=-1", "before=x", "version=-1"),
        *("since=yesterday", "since=2025-01-01T00:00:00"),
    ],
)
def test_a_filter_that_makes_no_sense_is_refused(server: RunningServer, query: str) -> None:
    assert problem(server.get(f"/novelties?{query}")) == (422, "invalid")


def test_groups_hold_every_novelty_once(server: RunningServer) -> None:
    for number in range(200, 206):
        arrive(server, strange(number))
    groups: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": 2}
    while True:
        page = server.get("/novelties/groups", params=query).json()
        groups += page["items"]
        if page["next_cursor"] is None:
            break
        query["before"] = page["next_cursor"]
    ids = [id for group in groups for id in group["ids"]]
    assert sorted(ids) == sorted(item["id"] for item in listed(server))
    assert [group["size"] for group in groups] == sorted((len(group["ids"]) for group in groups), reverse=True)
    for group in groups:
        assert [sample["id"] for sample in group["samples"]] == group["ids"][:8]
        assert {sample["group"] for sample in group["samples"]} == {group["id"]}
        assert [item["id"] for item in listed(server, group=group["id"])] == group["ids"]
    newest = server.get("/novelties/groups?order=newest").json()["items"]
    times = [group["newest_seen"] for group in newest]
    assert times == sorted(times, reverse=True)
    assert problem(server.get("/novelties/groups?before=7")) == (422, "invalid")
    assert problem(server.get("/novelties/groups?order=random")) == (422, "invalid")


# Pictures


@pytest.mark.parametrize(  # another picture each: the same one would fold
    ("number", "format", "kind"),
    [(300, "PNG", "image/png"), (301, "JPEG", "image/jpeg"), (302, "WEBP", "image/webp")],
)
def test_an_image_is_served_as_what_it_is_and_safely(
    server: RunningServer, number: int, format: str, kind: str
) -> None:
    data = strange(number, format=format)
    id = arrive(server, data)
    response = server.get(f"/novelties/{id}/image")
    headers = response.headers
    assert response.content == data
    assert (headers["content-type"], headers["x-content-type-options"]) == (kind, "nosniff")
    assert headers["content-disposition"].startswith("inline")
    assert "sandbox" in headers["content-security-policy"]
    assert {"private", "immutable"} <= {part.strip() for part in headers["cache-control"].split(",")}
    again = server.get(f"/novelties/{id}/image", headers={"If-None-Match": headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


HTML = b"<!DOCTYPE html><html><body><script>alert(document.cookie)</script></body></html>"


def test_an_image_with_an_html_payload_is_never_served_as_html(server: RunningServer) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("Comment", HTML.decode())
    payloads = [
        strange(310, pnginfo=text),
        strange(311) + HTML,
        strange(312, format="JPEG", comment=HTML),
        strange(313, format="WEBP") + HTML,
    ]
    for data in payloads:
        assert HTML in data
        id = arrive(server, data)
        for name in ("image", "thumbnail"):
            response = server.get(f"/novelties/{id}/{name}", headers={"Accept": "text/html"})
            assert response.headers["content-type"] in ("image/png", "image/jpeg", "image/webp")
            assert response.headers["x-content-type-options"] == "nosniff"
            assert response.headers["content-security-policy"] == "default-src 'none'; sandbox"
            assert (HTML in response.content) == (name == "image")  # thumbnails are made anew


@pytest.mark.parametrize("size", [64, 100, 512])
def test_a_thumbnail_is_an_upright_jpeg_of_at_most_that_size(server: RunningServer, size: int) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    id = arrive(server, strange(320, size=(900, 300), format="JPEG", exif=exif))
    response = server.get(f"/novelties/{id}/thumbnail", params={"size": size})
    assert response.headers["content-type"] == "image/jpeg"
    with Image.open(io.BytesIO(response.content)) as image:
        image.load()
        assert image.format == "JPEG"
        assert max(image.size) == image.size[1] == size
        assert abs(image.size[0] - size / 3) <= 1


def test_a_small_picture_is_not_blown_up(server: RunningServer) -> None:
    id = arrive(server, strange(321, size=(48, 36)))
    with Image.open(io.BytesIO(server.get(f"/novelties/{id}/thumbnail?size=512").content)) as image:
        assert image.size == (48, 36)


def test_who_has_a_thumbnail_already_is_told_so(server: RunningServer) -> None:
    id = arrive(server, strange(322))
    first = server.get(f"/novelties/{id}/thumbnail")
    path, etag = f"/novelties/{id}/thumbnail", first.headers["etag"]
    assert server.get(path).content == first.content
    for given in (etag, f'"other", W/{etag}', "*"):
        response = server.get(path, headers={"If-None-Match": given})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", etag)
    assert server.get(path, headers={"If-None-Match": '"other"'}).status_code == 200
    assert server.get(f"{path}?size=100", headers={"If-None-Match": etag}).status_code == 200
    for size in (63, 513):
        assert problem(server.get(f"{path}?size={size}")) == (422, "invalid")
    assert server.get(f"/novelties/{id}/thumbnail").status_code == 200
    assert httpx.delete(f"{server.url}/novelties/{id}").status_code == 204
    assert problem(server.get(path, headers={"If-None-Match": etag})) == (404, "not_found")


# Deciding


def test_novelties_are_put_aside_and_brought_back(server: RunningServer) -> None:
    one, other = (arrive(server, strange(number)) for number in (400, 401))
    body = {"ids": [one, other, "0" * 64]}
    assert server.post("/novelties/dismiss", json=body).json() == {
        "changed": [one, other],
        "missing": ["0" * 64],
    }
    assert server.post("/novelties/dismiss", json={"ids": [one]}).json() == {"changed": [], "missing": []}
    assert {one, other} <= {item["id"] for item in listed(server, state="dismissed")}
    assert not {one, other} & {item["id"] for item in listed(server)}
    assert server.get(f"/novelties/{one}").json()["state"] == "dismissed"
    assert server.post("/novelties/restore", json={"ids": [one]}).json() == {"changed": [one], "missing": []}
    assert one in {item["id"] for item in listed(server)}
    assert server.metric("openworld_novelties", state="dismissed") == 1


def test_a_deleted_novelty_is_gone_with_its_bytes(server: RunningServer) -> None:
    data = strange(410)
    id = arrive(server, data)
    prediction = predict(server, data)["id"]
    path = server.log.parent / "robot" / "inbox" / "images" / id[:2] / id
    wait_until(lambda: server.get(f"/novelties/{id}").json()["count"] == 2)
    assert path.read_bytes() == data
    assert httpx.delete(f"{server.url}/novelties/{id}").status_code == 204
    assert not path.exists()
    for name in ("", "/image", "/thumbnail"):
        assert problem(server.get(f"/novelties/{id}{name}")) == (404, "not_found")
    # Nor can it come back by its prediction's id.
    assert problem(server.post("/novelties", json={"prediction_ids": [prediction]})) == (404, "not_found")


def test_a_known_answer_that_is_wrong_goes_into_the_inbox(server: RunningServer) -> None:
    answers = [(data, predict(server, data)) for data in (known_image(f"class {c}", 700 + c) for c in range(5))]
    data, answer = next(pair for pair in answers if not pair[1]["novel"])
    id = sha256_bytes(data)
    assert problem(server.get(f"/novelties/{id}")) == (404, "not_found")
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
    # Asked for again, it is new again, and keeps its note.
    server.post("/novelties/dismiss", json={"ids": [id]})
    again = server.post("/novelties", json={"prediction_ids": [answer["id"]]}).json()["kept"][0]
    assert (again["novelty_id"], again["outcome"]) == (id, "folded")
    item = server.get(f"/novelties/{id}").json()
    assert (item["state"], item["count"], item["note"]) == ("new", 2, "a quince")


def test_ids_that_nobody_knows_are_404(server: RunningServer) -> None:
    for id in ("0" * 64, "x", "..%2f..%2fCURRENT", "%00", "a" * 128):
        for name in ("", "/image", "/thumbnail"):
            assert problem(server.get(f"/novelties/{id}{name}")) == (404, "not_found")
        assert problem(httpx.delete(f"{server.url}/novelties/{id}")) == (404, "not_found")
    for path in ("dismiss", "restore"):
        assert problem(server.post(f"/novelties/{path}", json={"ids": ["0" * 64]})) == (404, "not_found")
        assert problem(server.post(f"/novelties/{path}", json={"ids": ["../x"]})) == (422, "invalid")
        assert problem(server.post(f"/novelties/{path}", json={"ids": []})) == (422, "invalid")
    assert problem(server.post("/novelties", json={"prediction_ids": ["nobody"]})) == (404, "not_found")
    assert problem(server.post("/novelties", json={"prediction_ids": []})) == (422, "invalid")
    assert problem(server.post("/novelties", json={"prediction_ids": ["\0"]})) == (422, "invalid")


def test_only_labellers_see_the_inbox_and_only_operators_stored_images(tmp_path: Path) -> None:
    keys = ",".join(f"{role}:{role}:{secret}" for role, secret in KEYS.items())
    sha = "0" * 64
    inbox_routes = [
        *(("GET", path) for path in ("/novelties", "/novelties/groups", f"/novelties/{sha}")),
        *(("GET", f"/novelties/{sha}/image"), ("GET", f"/novelties/{sha}/thumbnail"), ("DELETE", f"/novelties/{sha}")),
        *(("POST", "/novelties/dismiss"), ("POST", "/novelties/restore"), ("POST", "/novelties")),
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
        # An inbox that is turned off has nothing, and says so.
        assert {ask(*route, "label") for route in inbox_routes} == {404}
        assert [ask(*route, "operate") for route in image_routes] == [404, 404, 200, 200]


# Many


def full_inbox(root: Path, count: int = 5000) -> None:
    """As many novelties as the inbox takes, in some six hundred groups; written at once, not one by one."""
    with contextlib.closing(Inbox(root)) as inbox:
        inbox.add(sighting(make_image(0)))
    path = root / "inbox" / "inbox.sqlite3"
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.row_factory = sqlite3.Row
        row = dict(connection.execute("SELECT * FROM novelties").fetchone())
        rows, image = [], io.BytesIO(make_image(0))
        for number, (_, vector) in enumerate(clusters(300, -(-count // 300), 1280, 0.3)[: count - 1], start=2):
            data = image.getvalue() + number.to_bytes(4, "big")
            id = sha256_bytes(data)
            (root / "inbox" / "images" / id[:2]).mkdir(exist_ok=True)
            (root / "inbox" / "images" / id[:2] / id).write_bytes(data)
            rows.append(row | {"id": id, "seen": number, "embedding": vector.astype("<f2").tobytes()})
        names = list(row)
        marks = ", ".join(f":{name}" for name in names)
        connection.executemany(f"INSERT INTO novelties ({', '.join(names)}) VALUES ({marks})", rows)


def test_five_thousand_novelties_are_listed_and_grouped_in_a_moment(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    full_inbox(data)
    with running_server(data, threads=1) as server:
        seconds = {}
        for path in (
            *("/novelties?limit=200", "/novelties?limit=200&before=2500", "/novelties/groups?limit=50"),
            *("/novelties/groups?limit=50&order=newest", "/novelties/groups?limit=200&before=9.9999"),
        ):
            started = time.perf_counter()
            response = server.get(path)
            seconds[path] = time.perf_counter() - started
            assert len(response.json()["items"]) == (200 if "limit=200" in path else 50)
        print(json.dumps({path: round(time, 3) for path, time in seconds.items()}))
        assert max(seconds.values()) < 5  # a second is plenty; the rest is for a machine that is busy
        group = server.get("/novelties/groups?limit=1").json()["items"][0]
        assert len(server.get("/novelties", params={"group": group["id"]}).json()["items"]) == group["size"]
