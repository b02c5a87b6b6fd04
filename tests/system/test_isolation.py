"""Every answer belongs to its image, with concurrent clients and every kind of request body."""

from __future__ import annotations

import base64
import io
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from PIL import Image

from openworld.cli import main
from tests.support.servers import IMAGES, RunningServer, known_image, learned_folder, novel_image, running_server

COUNT, CLIENTS = 500, 32
EXACT = ("label", "novel", "task", "version")
NUMBERS = ("score", "calibrated_score", "p_novel")


def make_image(number: int) -> bytes:
    """Image `number`: known or novel class, one of three formats and several sizes; every tenth is broken."""
    data = known_image(f"class {number % 5}", 1000 + number) if number % 3 else novel_image(number)
    image = Image.open(io.BytesIO(data)).resize((8 + number % 40, 8 + number % 23))
    buffer = io.BytesIO()
    image.save(buffer, format=("PNG", "JPEG", "WEBP")[number % 3], quality=90)
    data = buffer.getvalue()
    return data[: len(data) // 2] if number % 10 == 9 else data


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("isolation") / "robot")
    with running_server(data, inbox_rate=1000, request_timeout=60) as running:
        yield running


@pytest.fixture(scope="module")
def expected(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """The answers of `openworld predict`, one image after the other in one process."""
    folder = tmp_path_factory.mktemp("images")
    for number in range(COUNT):
        (folder / f"{number:04d}.png").write_bytes(make_image(number))
    data = server.log.parent / "robot"
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout", out)
        main(["predict", str(folder), "--data", str(data), "--json"])
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    return {int(Path(line["file"]).stem): line for line in lines}


def send(client: httpx.Client, url: str, numbers: list[int], way: str) -> list[dict[str, Any]]:
    """The answers in order; an unreadable image has its error instead."""
    images = [make_image(number) for number in numbers]
    if way == "raw":
        answers = []
        for image in images:
            response = client.post(f"{url}/predict", content=image, headers={"Content-Type": "image/jpeg"})
            body = response.json()
            answers.append({"error": body} if response.status_code == 422 else body["predictions"][0])
        return answers
    if way == "multipart":
        response = client.post(f"{url}/predict", files=[("images", ("x", image)) for image in images])
    else:
        response = client.post(f"{url}/predict", json={"images": [base64.b64encode(i).decode() for i in images]})
    body = response.json()
    if response.status_code == 422:  # none could be read
        return [{"error": body} for _ in images]
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = body["predictions"]
    return found


def test_500_images_from_32_clients_get_the_answers_of_the_command_line(
    server: RunningServer, expected: dict[int, dict[str, Any]]
) -> None:
    rng = random.Random(0)
    numbers = list(range(COUNT))
    rng.shuffle(numbers)
    jobs = []
    while numbers:
        size = rng.choice((1, 1, 2, 3, 7, 16))
        jobs.append((numbers[:size], rng.choice(("raw", "multipart", "base64"))))
        numbers = numbers[size:]
    limits = httpx.Limits(max_connections=CLIENTS)
    with httpx.Client(timeout=60, limits=limits) as client, ThreadPoolExecutor(CLIENTS) as pool:
        found = list(pool.map(lambda job: send(client, server.url, *job), jobs))
    answers = {
        number: one for (group, _), got in zip(jobs, found, strict=True) for number, one in zip(group, got, strict=True)
    }
    assert len(answers) == COUNT
    for number, wanted in expected.items():
        got = answers[number]
        if "error" in wanted:
            assert got["error"]["detail"] == wanted["error"], number
            continue
        assert {name: got[name] for name in EXACT} == {name: wanted[name] for name in EXACT}, number
        # Batches of another size sum in another order: the last digits of a float32 may differ.
        assert [got[name] for name in NUMBERS] == pytest.approx([wanted[name] for name in NUMBERS], rel=1e-4, abs=1e-4)
        assert [one["label"] for one in got["nearest"]] == [label for label, _ in wanted["nearest"]], number
    broken = sum("error" in one for one in expected.values())
    assert broken == COUNT // 10
    assert len({one["id"] for one in answers.values() if "error" not in one}) == COUNT - broken
    assert server.metric("openworld_batch_size_sum") == COUNT - broken
    assert server.metric("openworld_batch_size_count") < COUNT - broken  # some images were batched


def test_the_images_include_known_and_novel_ones(expected: dict[int, dict[str, Any]]) -> None:
    outcomes = {one["novel"] for one in expected.values() if "error" not in one}
    assert outcomes == {True, False}
    assert IMAGES.read("class 0/1") != IMAGES.read("class 0/2")
