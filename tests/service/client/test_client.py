"""Both Python clients against a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from service.client import ApiError, AsyncClient, Client, ClientError
from service.wire.predictions import Failure, Prediction
from tests.support.clients import KEY, call
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server, wait_until


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("client") / "robot")
    with running_server(data, threads=1, keys=f"robot:predict+operate:{KEY}") as running:
        yield running


def test_an_image_is_given_as_bytes_or_as_a_path(server: RunningServer, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(known_image("class 1"))
    for image in (known_image("class 1"), path):
        answer = call(kind, server.url, "predict", image)
        assert isinstance(answer, Prediction)
        assert (answer.label, answer.novel, answer.version) == ("class 1", False, 3)
        assert answer.nearest[0].label == "class 1"


def test_an_image_of_no_learned_class_is_novel(server: RunningServer, kind: str) -> None:
    answer = call(kind, server.url, "predict", novel_image(1))
    assert (answer.novel, answer.label) == (True, None)


def test_of_many_images_a_bad_one_is_a_failure(server: RunningServer, kind: str, tmp_path: Path) -> None:
    path = tmp_path / "photo.png"
    path.write_bytes(known_image("class 2"))
    images = [known_image("class 0"), b"no image", path, known_image("class 4")[:60], novel_image(2), b""]
    answers = call(kind, server.url, "predict_many", images)
    told = [answer.error.code if isinstance(answer, Failure) else answer.label for answer in answers]
    assert told == ["class 0", "unsupported_image", "class 2", "broken_image", None, "unsupported_image"]
    assert all(answer.error.detail for answer in answers if isinstance(answer, Failure))


def test_a_pinned_version_answers(server: RunningServer, kind: str) -> None:
    assert call(kind, server.url, "predict", known_image("class 2")).label == "class 2"
    pinned = call(kind, server.url, "predict", known_image("class 2"), version=1)
    assert (pinned.version, pinned.novel) == (1, True)  # version 1 has not learned that class
    many = call(kind, server.url, "predict_many", [known_image("class 0"), known_image("class 2")], version=2)
    assert [answer.version for answer in many] == [2, 2]


def test_an_error_carries_status_code_detail_and_request_id(server: RunningServer, kind: str) -> None:
    with pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", known_image("class 0"), version=99)
    error = found.value
    assert (error.status, error.code) == (404, "not_found")
    assert "99" in error.detail
    assert error.detail in str(error)
    assert "404 not_found" in str(error)
    # The log line is written after the answer is sent.
    wait_until(lambda: error.request_id in {line.get("request_id") for line in server.log_lines()})
    assert isinstance(error, ClientError)


@pytest.mark.parametrize(
    ("image", "status", "code"),
    [
        (b"text", 415, "unsupported_image"),
        (b"", 415, "unsupported_image"),
        (known_image("class 0")[:50], 422, "broken_image"),
    ],
)
def test_a_single_bad_image_is_an_error(server: RunningServer, kind: str, image: bytes, status: int, code: str) -> None:
    with pytest.raises(ApiError) as found:
        call(kind, server.url, "predict", image)
    assert (found.value.status, found.value.code) == (status, code)


def test_too_many_images_are_an_error_without_a_second_attempt(server: RunningServer, kind: str) -> None:
    before = server.metric("openworld_requests_total", route="/predict", code="413")
    with pytest.raises(ApiError) as found:
        call(kind, server.url, "predict_many", [known_image("class 0")] * 65)
    assert (found.value.status, found.value.code) == (413, "body_too_large")
    assert server.metric("openworld_requests_total", route="/predict", code="413") == before + 1


def test_a_missing_or_wrong_key_is_an_error(server: RunningServer, kind: str) -> None:
    for key in (None, "another-secret-0123456789"):
        with pytest.raises(ApiError) as found:
            call(kind, server.url, "predict", known_image("class 0"), key=key)
        assert (found.value.status, found.value.code) == (401, "unauthorized")
        assert "another-secret" not in str(found.value)


def test_versions_are_listed_and_activated(server: RunningServer, kind: str) -> None:
    try:
        assert [one.version for one in call(kind, server.url, "versions").versions] == [1, 2, 3]
        rolled_back = call(kind, server.url, "activate", 2, "a test of the client")
        assert (rolled_back.serving, rolled_back.history[-1].version) == (2, 2)
        assert "a test of the client" in rolled_back.history[-1].reason
        assert call(kind, server.url, "predict", known_image("class 0")).version == 2
    finally:
        assert call(kind, server.url, "activate", 3).serving == 3


def test_a_missing_file_is_an_error_before_anything_is_sent(kind: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        call(kind, "http://127.0.0.1:9", "predict", tmp_path / "nothing.jpg")


IMAGES = [known_image(f"class {number % 5}", 200 + number) for number in range(40)]


@pytest.fixture(scope="module")
def labels(server: RunningServer) -> list[str | None]:
    """The labels of IMAGES, predicted one after the other."""
    with Client(server.url, KEY) as client:
        return [client.predict(image).label for image in IMAGES]


def test_several_threads_share_one_client(server: RunningServer, labels: list[str | None]) -> None:
    assert len(set(labels)) >= 5
    with Client(server.url, KEY) as client, ThreadPoolExecutor(8) as pool:
        assert [answer.label for answer in pool.map(client.predict, IMAGES)] == labels


def test_several_tasks_share_one_async_client(server: RunningServer, labels: list[str | None]) -> None:
    async def all_at_once() -> list[Prediction]:
        async with AsyncClient(server.url, KEY) as client:
            return await asyncio.gather(*map(client.predict, IMAGES))

    assert [answer.label for answer in asyncio.run(all_at_once())] == labels
