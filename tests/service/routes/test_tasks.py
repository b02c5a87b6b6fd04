"""/tasks: every kind of batch, its errors, and the way of a task to a version."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from models.files import sha256_bytes
from models.versions.store import VersionStore
from tests.support.batches import check_batch
from tests.support.learning_loop import Loop, batch, loop
from tests.support.servers import IMAGES, known_image, learned_folder, novel_image, running_server, wait_until
from tests.support.tiny_model import tiny_backbone, tiny_settings


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loop]:
    """A server and a queue without a trainer."""
    with loop(tmp_path_factory.mktemp("idle")) as running:
        running.start("serve")
        yield running


def zipped(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def post(running: Loop, **arguments: object) -> httpx.Response:
    return httpx.post(f"{running.url}/tasks", timeout=30, **arguments)  # type: ignore[arg-type]


def test_a_form_and_a_zip_with_the_same_images_are_the_same_task(idle: Loop) -> None:
    form = idle.submit(batch("plum", "fig"))
    assert form.status_code == 202
    assert form.headers["location"] == f"/tasks/{form.json()['id']}"
    assert form.json()["state"] == "queued"
    assert form.json()["counts"] == {"fig": 6, "plum": 6}
    files = {f"fruit/{name}/{n}": IMAGES.read(f"{name}/{n}") for name in ("fig", "plum") for n in range(6)}
    again = post(idle, content=zipped(files), headers={"Content-Type": "application/zip"})
    assert (again.status_code, again.json()["id"], again.json()["fresh"]) == (202, form.json()["id"], False)


def test_novelties_and_predictions_are_labelled_by_their_ids(idle: Loop) -> None:
    def predict(image: bytes) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.post(f"{idle.url}/predict", content=image, timeout=30).json()["predictions"][0]
        return answer

    answers = [predict(novel_image(n)) for n in range(40, 44)]
    assert all(answer["novel"] for answer in answers)

    def inbox() -> list[dict[str, object]]:
        found: list[dict[str, object]] = httpx.get(f"{idle.url}/novelties", timeout=30).json()["items"]
        return found

    wait_until(lambda: len(inbox()) >= 3)
    by_novelty = [str(item["id"]) for item in inbox()][:2]
    known_id = predict(known_image("class 0", 77))["id"]
    unused = [a["id"] for a in answers if a["id"] not in {i["prediction_id"] for i in inbox() if i["id"] in by_novelty}]
    response = post(idle, json={"classes": {"gizmo": [*by_novelty], "widget": [unused[0], known_id]}})
    assert response.status_code == 202, response.text
    assert response.json()["counts"] == {"gizmo": 2, "widget": 2}
    labelled = httpx.get(f"{idle.url}/novelties", params={"state": "labelled"}, timeout=30).json()["items"]
    assert set(by_novelty) <= {item["id"] for item in labelled}


def test_a_novelty_whose_image_is_lost_is_a_problem_of_the_batch(idle: Loop) -> None:
    image = novel_image(45)
    httpx.post(f"{idle.url}/predict", content=image, timeout=30)
    wait_until(lambda: list((idle.data / "inbox").rglob(sha256_bytes(image))))
    for path in (idle.data / "inbox").rglob(sha256_bytes(image)):
        path.unlink()
    response = post(idle, json={"classes": {"gadget": [sha256_bytes(image)]}})
    assert (response.status_code, response.json()["code"]) == (422, "batch_invalid")
    (problem,) = response.json()["errors"]  # not also that the class is empty
    assert "is not kept" in problem["detail"]


def test_a_new_class_with_one_image_is_accepted_with_a_warning(idle: Loop) -> None:
    files = [("lonely", ("a.png", IMAGES.read("lonely/1")))]
    files += [("pair", (f"{at}.png", IMAGES.read(f"pair/{at}"))) for at in range(2)]
    response = idle.submit(files)
    assert response.status_code == 202
    assert response.json()["warnings"] == ["class 'lonely' has 1 image: more images make its answers better"]


def test_images_that_were_learned_under_another_label_are_named_in_the_answer_and_in_the_task(idle: Loop) -> None:
    files = [("class 1", (f"{n}.png", IMAGES.read(f"class 0/{n}"))) for n in range(2)]
    response = idle.submit([*files, *batch("class 1", start=50)])
    assert response.status_code == 202
    task = response.json()
    expected = ["class 'class 0' loses 2 images to class 'class 1': they were learned as 'class 0' before"]
    assert task["warnings"] == expected
    assert idle.task(task["id"])["warnings"] == expected
    listed = httpx.get(f"{idle.url}/tasks", timeout=30).json()["tasks"]
    assert [one["warnings"] for one in listed if one["id"] == task["id"]] == [expected]


def test_every_problem_of_a_batch_is_listed_in_one_response(idle: Loop) -> None:
    files = [
        ("empty", ("a.png", b"not an image either")),
        ("broken", ("b.png", b"not an image")),
        ("broken", ("c.png", IMAGES.read("x/1"))),
        ("../up", ("d.png", IMAGES.read("x/2"))),
        ("../up", ("e.png", IMAGES.read("x/3"))),
        ("one", ("f.png", IMAGES.read("x/4"))),
        ("two", ("g.png", IMAGES.read("x/4"))),
    ]
    response = idle.submit(files)
    assert (response.status_code, response.json()["code"]) == (422, "batch_invalid")
    problems = " | ".join(problem["detail"] for problem in response.json()["errors"])
    for part in ("'empty' has no image that can be read", "b.png", "'../up'", "the same image is in 2 classes"):
        assert part in problems
    assert httpx.get(f"{idle.url}/tasks", timeout=30).json()["counts"]["queued"] < 10


@pytest.mark.parametrize(
    ("arguments", "status", "code"),
    [
        ({"content": b"PK broken", "headers": {"Content-Type": "application/zip"}}, 422, "batch_invalid"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 400, "bad_request"),
        ({"json": {"classes": {"a": ["unknown", "ids"]}}}, 422, "batch_invalid"),
        ({"json": {"classes": {}}}, 422, "batch_invalid"),
        ({"content": b"x", "headers": {"Content-Type": "text/plain"}}, 415, "unsupported_body"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 400, "bad_request"),
        ({"data": {"cat": "text"}, "files": {"x": b""}}, 422, "batch_invalid"),
    ],
)
def test_a_malformed_batch_is_refused_with_its_code(
    idle: Loop, arguments: dict[str, object], status: int, code: str
) -> None:
    response = post(idle, **arguments)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text


@pytest.mark.parametrize("name", ["../../evil/1.png", "/etc/passwd", "a/../../b.png"])
def test_a_zip_with_paths_outside_of_it_is_refused(idle: Loop, name: str) -> None:
    data = zipped({name: IMAGES.read("x/1"), "cat/1.png": IMAGES.read("x/2")})
    response = post(idle, content=data, headers={"Content-Type": "application/zip"})
    assert response.status_code == 422
    assert "a path out of the zip" in response.text
    assert "/tmp" not in response.text  # the server's paths are not revealed


def test_a_zip_bomb_is_refused_by_its_directory(idle: Loop) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("cat/1.png", bytes(200 * 2**20))
    response = post(idle, content=buffer.getvalue(), headers={"Content-Type": "application/zip"})
    assert response.status_code == 422
    assert "would grow" in response.text


def test_an_idempotency_key_is_for_one_batch(idle: Loop) -> None:
    first = idle.submit(batch("elm"), key="k-1")
    assert idle.submit(batch("elm"), key="k-1").json()["id"] == first.json()["id"]
    conflict = idle.submit(batch("oak"), key="k-1")
    assert (conflict.status_code, conflict.json()["code"]) == (409, "idempotency_conflict")


def test_a_queued_task_is_cancelled_and_queued_again(idle: Loop) -> None:
    id = idle.submit(batch("birch")).json()["id"]
    assert httpx.post(f"{idle.url}/tasks/{id}/cancel", timeout=30).json()["state"] == "cancelled"
    assert httpx.post(f"{idle.url}/tasks/{id}/retry", timeout=30).json()["state"] == "queued"
    assert httpx.get(f"{idle.url}/tasks/unknown", timeout=30).json()["code"] == "unknown_task"
    listed = httpx.get(f"{idle.url}/tasks", params={"limit": 2}, timeout=30).json()
    assert len(listed["tasks"]) == 2
    rest = httpx.get(f"{idle.url}/tasks", params={"before": listed["next"], "limit": 200}, timeout=30).json()
    assert not {task["id"] for task in listed["tasks"]} & {task["id"] for task in rest["tasks"]}


def test_failed_tasks_are_listed_with_their_reasons(idle: Loop) -> None:
    id = idle.submit(batch("fail", "fail too")).json()["id"]
    lease = idle.queue.claim("worker")
    while lease is not None and lease.task.id != id:
        lease.reject("not of this test")
        lease = idle.queue.claim("worker")
    assert lease is not None
    lease.fail("no disk", retry=False)
    failed = httpx.get(f"{idle.url}/tasks", params={"state": "failed"}, timeout=30).json()["tasks"]
    assert [(task["id"], task["reason"], task["attempts"]) for task in failed] == [(id, "no disk", 1)]


def test_a_server_without_a_queue_refuses_tasks_and_predicts(tmp_path: Path) -> None:
    with running_server(learned_folder(tmp_path / "robot")) as server:
        refused = server.post("/tasks", files=batch("plum"))
        assert (refused.status_code, refused.json()["code"]) == (503, "no_queue")
        assert server.post("/predict", content=known_image("class 0")).status_code == 200


def test_a_task_is_followed_to_a_version_that_equals_that_of_openworld_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, restore_torch_settings: None
) -> None:
    """The same batch over HTTP and by `learn` gives byte-identical tensors."""
    from trainer import context
    from trainer import publish as publishing

    files = batch("plum", "fig", images=8)
    with loop(tmp_path) as running:
        running.start("serve")
        running.start("train")
        id = running.submit(files).json()["id"]
        events = []
        with httpx.stream("GET", f"{running.url}/tasks/{id}/events", timeout=60) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    events.append(json.loads(line.removeprefix("data: ")))
        assert events[-1]["state"] == "published"
        assert events[-1]["version"] == 4
        assert {report["task"] for report in events[-1]["result"]["tasks"]} == {0, 1, 2, 3}
        assert events[-1]["result"]["advice"] == httpx.get(f"{running.url}/versions/4", timeout=30).json()["advice"]
        assert set(events[-1]["result"]["advice"]) == {"confused", "wrong_labels", "weak"}
        progress = [event["progress"]["progress"] for event in events if event["progress"]]
        assert progress == sorted(progress)
        learned = VersionStore(running.data).load(4)

    monkeypatch.setattr(context, "open_backbone", lambda *arguments: tiny_backbone())
    other = learned_folder(tmp_path / "other")
    labelled = check_batch((name, origin, data) for name, (origin, data) in files)
    outcome = publishing.learn_batch(other, labelled, tiny_settings(), lambda event: None)
    assert outcome.manifest.version == 4
    by_command = VersionStore(other).load(4)
    assert learned.tensors.keys() == by_command.tensors.keys()
    assert all(np.array_equal(learned.tensors[name], by_command.tensors[name]) for name in learned.tensors)
    assert learned.manifest.files == by_command.manifest.files
