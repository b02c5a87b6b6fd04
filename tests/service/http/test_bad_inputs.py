"""Malformed requests get their documented error, and affect neither the server nor other requests."""

from __future__ import annotations

import base64
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.bad_images import JPEG, MIB, PNG, oriented
from tests.support.bad_inputs import FORM, JSON, LIMITS, Case, Reply, corpus, file, form, send
from tests.support.servers import (
    RunningServer,
    known_image,
    learned_folder,
    novel_image,
    running_server,
    wait_until,
)

ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
PROBLEM = {"type", "title", "status", "code", "detail", "request_id"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("bad") / "robot")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch:
        # With its default, adaptive threshold glibc sometimes keeps up to 60 MiB of freed blocks. With a fixed one it
        # returns them, so that resident memory is what the server holds.
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "131072")
        with running_server(folder, fresh=True, threads=1, **LIMITS) as server:
            yield server


@pytest.fixture(scope="module")
def address(server: RunningServer) -> tuple[str, int]:
    return address_of(server)


def address_of(server: RunningServer) -> tuple[str, int]:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return host, int(port)


def check(reply: Reply, case: Case) -> None:
    """The reply has the status and the code of the case, and the shape of problem details."""
    problem = "problem" in reply.headers.get("content-type", "")
    code = reply.json()["code"] if problem else ""
    assert (reply.status, code) == (case.status, case.code), reply.body[:500]
    if problem:
        check_problem(reply)
    elif reply.status == 200 and case.path.startswith("/predict") and case.raw is None:
        answers = reply.json()["predictions"]
        assert answers
        assert all(answer["novel"] == (answer["label"] is None) for answer in answers)


def check_problem(reply: Reply) -> None:
    problem = reply.json()
    assert reply.headers["content-type"] == "application/problem+json"
    assert set(problem) - {"errors"} == PROBLEM
    assert problem["status"] == reply.status
    assert problem["type"] == "about:blank"
    assert problem["title"]
    assert 0 < len(problem["detail"]) < 2000
    assert problem["request_id"] == reply.headers["x-request-id"]
    assert ID.fullmatch(problem["request_id"])
    assert ("allow" in reply.headers) == (reply.status == 405)


@pytest.mark.parametrize("case", corpus(), ids=lambda case: case.name)
def test_a_malformed_request_gets_its_error(address: tuple[str, int], case: Case) -> None:
    check(send(address, case), case)


def test_the_corpus_is_large_and_its_names_are_unique() -> None:
    assert len({case.name for case in corpus()}) == len(corpus()) >= 200


# EXIF orientation


def answer_to(address: tuple[str, int], data: bytes) -> dict[str, object]:
    reply = send(address, Case("", 200, body=data))
    assert reply.status == 200
    (answer,) = reply.json()["predictions"]
    return {name: value for name, value in answer.items() if name != "id"}


LOSSLESS = {"lossless": True}
SHARP = {"quality": 95, "subsampling": 0}


@pytest.mark.parametrize("orientation", range(2, 9))
@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", LOSSLESS), ("JPEG", SHARP)])
def test_a_rotated_image_has_the_answer_of_the_upright_one(
    address: tuple[str, int], format: str, options: dict[str, int], orientation: int
) -> None:
    upright = oriented(1, format, **options)
    assert answer_to(address, oriented(orientation, format, **options)) == answer_to(address, upright)


def test_a_rotated_image_without_orientation_has_another_answer(address: tuple[str, int]) -> None:
    # Otherwise the test above would pass on a server that ignores the pixels.
    assert answer_to(address, oriented(6, "PNG", says=1)) != answer_to(address, oriented(1, "PNG"))


# Valid and invalid images in one request

MIXED: list[tuple[bytes, str | None]] = [  # bytes, and the label, or the error code after an exclamation mark
    (known_image("class 0"), "class 0"),
    (b"hello", "!unsupported_image"),
    (known_image("class 2"), "class 2"),
    (PNG[:500], "!broken_image"),
    (novel_image(1), None),
    (b"", "!unsupported_image"),
    (PNG + bytes(MIB), "!image_too_large"),
    (known_image("class 4"), "class 4"),
]


def outcomes(reply: Reply) -> list[str | None]:
    assert reply.status == 200, reply.body[:500]
    answers = reply.json()["predictions"]
    return [f"!{answer['error']['code']}" if "error" in answer else answer["label"] for answer in answers]


def test_in_a_form_bad_images_fail_alone_and_keep_their_position(address: tuple[str, int]) -> None:
    body = form(*(file(data) for data, _ in MIXED))
    assert outcomes(send(address, Case("", 200, body=body, type=FORM))) == [expected for _, expected in MIXED]


def test_in_json_bad_images_fail_alone_and_keep_their_position(address: tuple[str, int]) -> None:
    texts = [base64.b64encode(data).decode() for data, _ in MIXED]
    texts.insert(3, "no base64!")
    body = b'{"images": [%s]}' % ",".join(f'"{text}"' for text in texts).encode()
    expected = [outcome for _, outcome in MIXED]
    expected.insert(3, "!bad_base64")
    assert outcomes(send(address, Case("", 200, body=body, type=JSON))) == expected


def test_if_every_image_is_bad_the_request_fails_like_the_first(address: tuple[str, int]) -> None:
    body = form(file(PNG[:500]), file(b"hello"), file(b""))
    check(send(address, Case("", 422, "broken_image", body, FORM)), Case("", 422, "broken_image"))


# Disconnects


def logged_errors(server: RunningServer) -> list[str]:
    """The errors in the server's log."""
    # uvicorn logs this for a pipelined request after a disconnect, of which it informs the last request only.
    lines = [line for line in server.log_lines() if "returned without completing response" not in line["message"]]
    return [line.get("exception", line["message"]) for line in lines if line["level"] == "error" or "exception" in line]


PARTIAL_REQUESTS = {
    "half a request line": b"POST /pre",
    "half its headers": b"POST /predict HTTP/1.1\r\nHost: ro",
    "no body": b"POST /predict HTTP/1.1\r\nHost: robot\r\nContent-Length: 5000\r\n\r\n",
    "half a body": b"POST /predict HTTP/1.1\r\nHost: robot\r\nContent-Length: 5000\r\n\r\n" + JPEG[:300],
    "half a chunk": b"POST /predict HTTP/1.1\r\nHost: robot\r\nTransfer-Encoding: chunked\r\n\r\n1000\r\n" + JPEG[:300],
    "half a form": b"POST /predict HTTP/1.1\r\nHost: robot\r\nContent-Length: 9000\r\nContent-Type: "
    + FORM.encode()
    + b"\r\n\r\n"
    + form(file(PNG))[:900],
    "a request whose response is not read": Case("", 200, body=JPEG).request(),
    "two pipelined requests whose responses are not read": Case("", 200, body=JPEG).request() * 2,
}


@pytest.mark.parametrize("partial", PARTIAL_REQUESTS.values(), ids=PARTIAL_REQUESTS)
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
def test_a_disconnect_in_the_middle_leaves_nothing_behind(
    server: RunningServer, address: tuple[str, int], partial: bytes, how: str
) -> None:
    before = logged_errors(server)
    connection = socket.create_connection(address, timeout=10)
    connection.sendall(partial)
    if how == "half-close":
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    elif how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    wait_until(lambda: server.metric("openworld_in_flight_images") == 0)
    assert answer_to(address, known_image("class 0"))["label"] == "class 0"
    assert logged_errors(server) == before  # a disconnect is not an error of the server


# Repetition


def test_four_passes_over_the_corpus_do_not_grow_memory_or_block_the_server(
    server: RunningServer, address: tuple[str, int], record_property: pytest.RecordProperty
) -> None:
    process, resident, before = psutil.Process(server.process.pid), [], logged_errors(server)
    for _ in range(4):
        for number, case in enumerate(corpus()):
            assert send(address, case).status < 500, case.name
            if number % 25 == 0:
                assert send(address, Case("", 200, method="GET", path="/livez")).status == 200  # it has a timeout
        resident.append(process.memory_info().rss)
    shown = [round(size / MIB, 1) for size in resident]
    record_property("resident_mib", shown)
    print("resident MiB after each pass:", shown)  # shown with -s
    assert resident[3] - resident[1] <= max(0.05 * resident[1], 20 * MIB), shown
    assert server.process.poll() is None
    assert answer_to(address, known_image("class 3"))["label"] == "class 3"
    assert server.metric("openworld_in_flight_images") == server.metric("openworld_queue_depth") == 0
    assert logged_errors(server) == before


# Memory


def high_water(server: RunningServer) -> int:
    """The peak of resident memory, in bytes."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


@pytest.fixture
def fresh(folder: Path, tmp_path: Path) -> Iterator[RunningServer]:
    """A server that has answered one small image only."""
    with running_server(folder, tmp_path / "log", fresh=True, threads=1, inbox="false", **LIMITS) as server:
        send(address_of(server), Case("", 200, body=JPEG))
        yield server


ENTRIES = b'{"images": [' + b",".join([b"1"] * (MIB // 2)) + b"]}"
KEYS = b'{"images": []' + b"".join(b',"%06d":1' % number for number in range(MIB // 11)) + b"}"


@pytest.mark.parametrize("body", [ENTRIES, KEYS], ids=["wrong entries", "wrong keys"])
def test_a_mebibyte_of_wrong_json_takes_a_few_mebibytes(fresh: RunningServer, body: bytes) -> None:
    before = high_water(fresh)
    assert send(address_of(fresh), Case("", 400, body=body, type=JSON), 60).status in (400, 413)
    assert high_water(fresh) - before < 40 * MIB


def test_endless_headers_are_cut_off(fresh: RunningServer) -> None:
    """Headers are read before admission, so they must be bounded on their own."""
    before, line = high_water(fresh), b"X-Header: value\r\n" * 4096
    with socket.create_connection(address_of(fresh), timeout=10) as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: robot\r\n")
        try:
            for _ in range(8 * MIB // len(line)):
                connection.sendall(line)
            connection.sendall(b"\r\n")
            status = connection.recv(12)[9:]
        except ConnectionError:  # also accepted: cut off while sending
            status = b""
    assert status in (b"", b"400", b"431")
    assert high_water(fresh) - before < 4 * MIB


def test_no_route_reads_a_body_without_a_valid_key(folder: Path, tmp_path: Path) -> None:
    """The key is checked before 16 MiB are received."""
    keys, wrong = "robot:predict:a-secret-of-the-tests", []
    with running_server(folder, tmp_path / "log", fresh=True, threads=1, inbox="false", keys=keys, **LIMITS) as server:
        paths = server.get("/openapi.json").json()["paths"]
        writing = [(method.upper(), path) for path, item in paths.items() for method in item if method != "get"]
        for method, path in writing:
            before, path = high_water(server), re.sub(r"{\w+}", "1", path)
            case = Case("", 401, method=method, path=path, body=b" " * (16 * MIB), type=JSON, chunked=True)
            status, taken = send(address_of(server), case).status, high_water(server) - before
            if status not in (401, 413) or taken > 8 * MIB:
                wrong.append(f"{method} {path}: {status}, took {taken / MIB:.0f} MiB")
    assert len(writing) >= 2
    assert not wrong, "\n".join(wrong)
