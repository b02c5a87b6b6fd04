"""Stored images over HTTP: operators see what refers to an image and remove images by key or by age."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from PIL import Image

from models.files import sha256_bytes
from models.versions.store import VersionStore
from tasks.images import ImageStore
from tests.support.images import make_image
from tests.support.servers import RunningServer, learned_folder, running_server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("retention") / "robot")
    with running_server(data, threads=1, poll_seconds=0.1) as running:
        yield running


@pytest.fixture(scope="module")
def shas(server: RunningServer) -> list[str]:
    """Three stored images, all of them old: the current version replays the first, its parent the second."""
    root = server.log.parent / "robot"
    store, images = VersionStore(root), ImageStore(root)
    shas = [images.put(make_image(n, (64, 48))) for n in range(3)]
    for remembered in (shas[1], shas[0]):
        loaded = store.load()
        samples: dict[str, Any] = {**loaded.samples, "memory": {**loaded.samples["memory"], "class 0": [remembered]}}
        parent = loaded.manifest.version
        manifest = loaded.manifest.model_copy(update={"parent": parent, "task_id": f"edit-{parent}"})
        store.publish(manifest, loaded.tensors, samples)
        if remembered == shas[1]:
            store.reject(manifest.model_copy(update={"task_id": "some-task"}), loaded.tensors, samples, "for a test")
    for sha in shas:
        os.utime(root / "images" / sha[:2] / sha, (0, 0))
    server.wait_for_version(5)
    return shas


def delete(server: RunningServer, path: str) -> httpx.Response:
    return httpx.delete(f"{server.url}{path}", timeout=30)


def test_an_operator_sees_what_refers_to_an_image_and_must_force_its_removal(
    server: RunningServer, shas: list[str]
) -> None:
    uses = server.get(f"/images/{shas[0]}").json()
    assert (uses["stored"], uses["bytes"], uses["stored_at"]) == (
        *(True, len(make_image(0, (64, 48)))),
        "1970-01-01T00:00:00Z",
    )
    assert (uses["in_memory_of"], uses["held_out_by"], uses["in_use_now"]) == ([5], [], True)
    assert (uses["sha256"], uses["tasks"], uses["inbox"]) == (shas[0], [], False)
    refused = delete(server, f"/images/{shas[0]}")
    assert (refused.status_code, refused.json()["code"]) == (409, "image_in_use")
    assert [error["detail"] for error in refused.json()["errors"]] == ["version 5 has it in its replay memory"]
    assert server.get(f"/images/{shas[0]}").json()["stored"]
    for path in (f"/images/{'0' * 64}", f"/images/{'0' * 64}?force=true"):
        answers = [delete(server, path), server.get(path)]
        assert [(answer.status_code, answer.json()["code"]) for answer in answers] == [(404, "not_found")] * 2
    assert server.get("/images/nonsense").json()["code"] == "invalid"


def test_a_stored_image_has_a_thumbnail_until_it_is_erased(server: RunningServer) -> None:
    data = make_image(88, (400, 200))
    sha = ImageStore(server.log.parent / "robot").put(data)
    answer = server.get(f"/images/{sha}/thumbnail?size=64")
    assert answer.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(answer.content)).size == (64, 32)
    assert delete(server, f"/images/{sha}").status_code == 200
    assert server.get(f"/images/{sha}/thumbnail?size=64").status_code == 404


def test_an_age_below_a_day_or_no_confirmation_removes_nothing(server: RunningServer, shas: list[str]) -> None:
    for query, code in (
        *(("", "invalid"), ("?older_than_days=0.5&confirm=true", "invalid"), ("?older_than_days=nan", "invalid")),
        *(("?older_than_days=30", "bad_request"), ("?older_than_days=30&confirm=false", "bad_request")),
    ):
        assert delete(server, f"/images{query}").json()["code"] == code
    assert all(server.get(f"/images/{sha}").json()["stored"] for sha in shas)


def test_a_removal_removes_the_image_from_the_inbox_too(server: RunningServer, shas: list[str]) -> None:
    # Two old images that are also in the inbox.
    for data, sha in ((make_image(1, (64, 48)), shas[1]), (make_image(2, (64, 48)), shas[2])):
        answer = server.post("/predict", content=data).json()["predictions"][0]
        server.post("/novelties", json={"prediction_ids": [answer["id"]]})
        wait_until(lambda sha=sha: server.get(f"/novelties/{sha}").status_code == 200)
    assert server.get(f"/images/{shas[2]}").json()["inbox"]
    size = len(make_image(1, (64, 48)))
    expired = server.get("/images/expired?older_than_days=30").json()
    assert (expired["older_than_days"], expired["images"], expired["kept"]) == (30, 2, 1)
    assert (expired["bytes"], expired["kept_bytes"]) == (
        size + len(make_image(2, (64, 48))),
        len(make_image(0, (64, 48))),
    )
    assert delete(server, f"/images/{shas[1]}").status_code == 409
    forced = delete(server, f"/images/{shas[1]}?force=true").json()
    assert (forced["images"], forced["bytes"], forced["novelties"], forced["recent"]) == (1, size, 1, 1)
    assert forced["remains"][0].startswith(
        "version 4, trained with it: weights and statistics keep its influence, also"
    )
    assert forced["remains"][1].startswith("rejected/some-task, trained with it")
    assert any("records of tasks" in sentence for sentence in forced["remains"])
    assert any("backups" in sentence for sentence in forced["remains"])
    assert server.get(f"/novelties/{shas[1]}").status_code == 404
    removed = delete(server, "/images?older_than_days=30&confirm=true").json()
    counts = {name: removed[name] for name in ("images", "bytes", "novelties")}
    assert counts == {"images": 1, "bytes": len(make_image(2, (64, 48))), "novelties": 1}
    assert server.get(f"/novelties/{shas[2]}").status_code == 404
    assert server.get(f"/images/{shas[0]}").json()["stored"]
    # The version that has lost its image is still listed and still answers.
    assert server.get(f"/images/{shas[1]}").json()["in_memory_of"] == [4]
    answer = server.post("/predict?version=4", content=make_image(9)).json()["predictions"][0]
    assert answer["version"] == 4


def test_an_image_that_is_only_a_novelty_can_be_removed(server: RunningServer) -> None:
    data = make_image(77, (40, 30))
    answer = server.post("/predict", content=data).json()["predictions"][0]
    server.post("/novelties", json={"prediction_ids": [answer["id"]]})
    sha = sha256_bytes(data)
    uses = server.get(f"/images/{sha}").json()
    assert (uses["stored"], uses["bytes"], uses["inbox"]) == (False, None, True)
    removed = delete(server, f"/images/{sha}").json()
    assert (removed["images"], removed["bytes"], removed["novelties"], removed["recent"]) == (0, 0, 1, 1)
    assert server.get(f"/images/{sha}").status_code == 404


def test_an_image_that_is_only_in_memory_can_be_removed(server: RunningServer) -> None:
    data = make_image(78, (40, 30))
    answer = server.post("/predict", content=data).json()["predictions"][0]
    delete(server, f"/novelties/{sha256_bytes(data)}")  # if it was novel
    again = server.post("/predict", content=make_image(79, (40, 30))).json()["predictions"][0]
    removed = delete(server, f"/images/{sha256_bytes(make_image(79, (40, 30)))}").json()
    assert (removed["images"], removed["recent"]) == (0, 1)
    reported = server.post("/novelties", json={"prediction_ids": [answer["id"], again["id"]]})
    assert reported.status_code in (200, 404)
    assert again["id"] not in [kept["prediction_id"] for kept in reported.json().get("kept", [])]
