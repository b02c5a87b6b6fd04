"""The images that buildah made from the Dockerfile: their programs answer, learn and stop as an unprivileged user."""

from __future__ import annotations

import os
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.built_images import USER, image, running
from tests.support.coloured_images import coloured_image
from tests.support.docker import PROGRAMS, SECRET, STAGES, redis_of_compose
from tests.support.ports import free_port
from tests.support.servers import known_image, learned_folder
from tests.support.waiting import wait_until

KEYS = f"everything:predict+label+operate:{SECRET}"


def client(port: int) -> httpx.Client:
    bearer = {"Authorization": f"Bearer {SECRET}"}
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=bearer, timeout=30, trust_env=False)


def is_ready(server: httpx.Client) -> bool:
    try:
        return server.get("/readyz").status_code == 200
    except httpx.TransportError:
        return False


def answer_to(server: httpx.Client, body: bytes, media_type: str) -> str | None:
    answer = server.post("/predict", content=body, headers={"Content-Type": media_type})
    assert answer.status_code == 200, answer.text
    label: str | None = answer.json()["predictions"][0]["label"]
    return label


def owned_by_the_user(folder: Path) -> Path:
    """Give a folder to the user of the images, and let that user pass through the folders above."""
    folder.mkdir(exist_ok=True)
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, USER, USER)
    for parent in list(folder.parents)[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    return folder


@pytest.mark.parametrize("target", PROGRAMS)
def test_an_image_has_the_configuration_of_the_dockerfile(target: str) -> None:
    config, stage = image(target), STAGES[target]
    assert config["User"] == stage.last("USER").value
    assert config["Entrypoint"] == stage.last("ENTRYPOINT").exec_form
    assert config["Cmd"] == stage.last("CMD").exec_form
    assert config["StopSignal"] == stage.last("STOPSIGNAL").value
    assert config["Healthcheck"]["Test"][:2] == ["CMD", "python"], "the OCI format would drop it"
    assert {f"{name}={value}" for name, value in stage.environment.items()} <= set(config["Env"])


def test_the_server_image_answers_as_an_unprivileged_user_and_writes_only_to_the_data_folder(tmp_path: Path) -> None:
    image("server")
    data, port = owned_by_the_user(learned_folder(tmp_path / "robot")), free_port()
    settings = {"OPENWORLD_PORT": port, "OPENWORLD_KEYS": KEYS}
    with running("server", data, tmp_path / "log", settings) as program, client(port) as server:
        wait_until(lambda: is_ready(server), 60)
        assert program.process.uids().effective == USER
        assert answer_to(server, known_image("class 0"), "image/png") == "class 0"
        assert program.stop() == 0
        assert program.written_files() == set(), "the root file system can be read-only"


def test_both_images_together_learn_a_task_and_answer_with_it(tmp_path: Path) -> None:
    image("server")
    image("trainer")
    data, port = owned_by_the_user(tmp_path / "robot"), free_port()
    with redis_of_compose(tmp_path / "redis") as redis, client(port) as server:
        shared = {"OPENWORLD_REDIS_URL": redis}
        serve = shared | {"OPENWORLD_PORT": port, "OPENWORLD_KEYS": KEYS}
        train = shared | {"OPENWORLD_TRAIN_METRICS_PORT": free_port(), "OPENWORLD_TRAIN_METRICS_HOST": "127.0.0.1"}
        with (
            running("server", data, tmp_path / "serve.log", serve) as program,
            running("trainer", data, tmp_path / "train.log", train) as trainer,
        ):
            wait_until(lambda: is_ready(server), 60)
            files = [(name, (f"{n}.jpg", coloured_image(name, n))) for name in ("red", "blue") for n in range(10)]
            submitted = server.post("/tasks", files=files)
            assert submitted.status_code == 202, submitted.text
            task = f"/tasks/{submitted.json()['id']}"
            wait_until(lambda: server.get(task).json()["state"] in ("published", "rejected", "failed"), 240, 0.5)
            assert server.get(task).json()["state"] == "published", trainer.log.read_text()
            wait_until(lambda: answer_to(server, coloured_image("red", 100), "image/jpeg") == "red", 30)
            assert trainer.process.uids().effective == USER
            for one in (program, trainer):
                assert one.stop() == 0
                assert one.written_files() == set()
