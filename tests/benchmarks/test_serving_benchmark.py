"""The serving benchmark's parser, load generator, figures and report."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from benchmarks.serving import load, report
from benchmarks.serving.__main__ import arguments
from benchmarks.serving.contenders import BARE, SERVICE
from benchmarks.serving.figures import Measured, medians, percentile
from benchmarks.serving.made_images import HEIGHT, WIDTH, make_image
from benchmarks.serving.process import free_port
from benchmarks.serving.wire import BadResponse, Response, ResponseReader, form_request, raw_request

PLAIN = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"4;name=value\r\nhe\r\n\r\n1\r\n!\r\n0\r\nTrailer: unwanted\r\n\r\n"
)
EMPTY = b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n"
STREAM = b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN + CHUNKED + PLAIN + EMPTY
RESPONSES = [
    Response(200, b"hello", False),
    Response(200, b"he\r\n!", False),
    Response(200, b"hello", False),
    Response(204, b"", True),
]


# Figures


def test_percentiles_lie_between_the_two_nearest_values() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.5) == 1.5
    assert percentile([5.0], 0.99) == 5.0
    assert percentile([float(n) for n in range(101)], 0.99) == pytest.approx(99.0)
    assert math.isnan(percentile([], 0.5))


def test_a_measurement_survives_json() -> None:
    measured = Measured.of([0.001, 0.002, 0.003], 1.5, answered=4, wrong=1, errors={"503": 2})
    assert Measured.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    assert (measured.images_per_second, measured.p50_ms, measured.slowest_ms) == (2.0, 2.0, 3.0)


def test_medians_keep_the_nesting_and_drop_non_numbers() -> None:
    rounds = [{"a": 1, "b": {"c": 2.0, "d": "x"}}, {"a": 3, "b": {"c": 4.0, "d": "y"}}, {"a": 2, "b": {"c": 9.0}}]
    assert medians(rounds) == {"a": 2, "b": {"c": 4.0}}


# The wire


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_responses_do_not_depend_on_how_the_bytes_are_split(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    reader = ResponseReader()
    pieces = [STREAM[a:b] for a, b in pairwise(places)]
    assert [response for piece in pieces for response in reader.feed(piece)] == RESPONSES
    assert reader.end() is None


def test_responses_are_parsed_byte_by_byte() -> None:
    reader = ResponseReader()
    assert [found for byte in STREAM for found in reader.feed(bytes([byte]))] == RESPONSES


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nall ") == []
    assert reader.feed(b"of it") == []
    assert reader.end() == Response(200, b"all of it", True)


def test_a_truncated_body_is_not_a_response() -> None:
    reader = ResponseReader()
    assert reader.feed(PLAIN[:-1]) == []
    assert reader.end() is None


@pytest.mark.parametrize(
    "rubbish",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnot hex\r\n",
        b"x" * 2**17,
    ],
)
def test_bytes_that_are_not_a_response_are_refused(rubbish: bytes) -> None:
    with pytest.raises(BadResponse):
        ResponseReader().feed(rubbish)


def test_requests_carry_the_image_and_their_length() -> None:
    for request in (
        raw_request("h:1", "/predict", b"\xff\xd8"),
        form_request("h:1", "/predict", b"\xff\xd8", "images"),
    ):
        head, _, body = request.partition(b"\r\n\r\n")
        assert head.startswith(b"POST /predict HTTP/1.1\r\nHost: h:1\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        assert b"\xff\xd8" in body


@pytest.mark.parametrize(
    ("body", "label"),
    [
        (b'{"predictions": [{"label": "apple"}]}', "apple"),
        (b'[{"label": null}]', None),
        (b'{"label": "pear", "novel": false}', "pear"),
    ],
)
def test_a_label_is_found_in_every_contenders_format(body: bytes, label: str | None) -> None:
    assert load.label_of(body) == label


# The load


@asynccontextmanager
async def local_server(answers: Sequence[bytes]) -> AsyncIterator[int]:
    """Send the given responses in turn; an empty one closes the connection."""
    served = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal served
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"Content-Length"))
                await reader.readexactly(int(length.partition(b":")[2]))
                answer, served = answers[served % len(answers)], served + 1
                if not answer:
                    break
                writer.write(answer)
                await asyncio.sleep(0.001)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, load.HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def answer(label: str, status: str = "200 OK") -> bytes:
    body = json.dumps({"predictions": [{"label": label}]}).encode()
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


def loaded(answers: Sequence[bytes], clients: int, seconds: float, warm: float = 0.0) -> Measured:
    async def measure() -> Measured:
        async with local_server(answers) as port:
            requests = [raw_request(f"{load.HOST}:{port}", "/predict", b"image")]
            return await load.run(port, requests, ["apple"], clients, warm, seconds)

    return asyncio.run(measure())


def test_the_load_counts_responses_inside_its_window() -> None:
    measured = loaded([answer("apple")], clients=4, seconds=1.0, warm=0.2)
    assert 0 < measured.images < measured.answered
    assert measured.images_per_second == pytest.approx(measured.images / 1.0)
    assert 0 < measured.p50_ms <= measured.p99_ms <= measured.slowest_ms
    assert (measured.wrong, measured.errors) == (0, {})


def test_the_load_counts_wrong_labels_errors_and_broken_connections() -> None:
    answers = [
        answer("apple"),
        answer("pear"),
        answer("apple", "503 Busy"),
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\n{",
    ]
    measured = loaded(answers, clients=2, seconds=0.6)
    assert measured.answered > measured.wrong > 0
    assert measured.errors.keys() == {"503", "connection lost", "unreadable answer"}


def test_the_load_ends_in_time_without_a_server() -> None:
    measured = asyncio.run(load.run(free_port(), [b""], [None], 2, 0.0, 0.2))
    assert (measured.images, list(measured.errors)) == (0, ["no connection"])


# The report


def loop_round(rate: float, p50: float) -> dict[str, Any]:
    idle = Measured.of([p50 / 1000], 1.0).to_dict()
    speed = {"images_per_second": rate, "cpu_ms_per_image": 1.0}
    ways = {"sequential": speed, "overlapped": speed, "parallel": speed}
    return {"idle": idle, **ways, "fastest": "sequential", **speed, "others": 0.0}


def server_round(rate: float, p50: float, p99: float, others: float = 0.0, wrong: int = 0) -> dict[str, Any]:
    idle = Measured.of([p50 / 1000], 1.0).to_dict() | {"others": 0.0, "cpu_ms_per_image": 1.0}
    saturated = idle | {"images_per_second": rate, "p99_ms": p99, "others": others, "wrong": wrong}
    return {"start_seconds": 1.0, "idle": idle, "saturated": saturated}


def test_bars_compare_medians_of_paired_rounds() -> None:
    rounds = {
        BARE: [loop_round(100, 5), loop_round(50, 9), loop_round(100, 5)],
        SERVICE: [server_round(95, 7, 40), server_round(47, 11, 80), server_round(20, 7, 40)],
        "slower": [server_round(50, 9, 90), server_round(20, 9, 90), server_round(50, 9, 90)],
        "faster": [server_round(99, 9, 30), server_round(99, 9, 30), server_round(99, 9, 30)],
    }
    result = report.summarise(rounds)
    bars = {bar["name"]: bar for bar in result["bars"]}
    of_bare, added = bars["images/s, share of the bare loop's"], bars["ms added to the bare loop at p50, idle"]
    assert (of_bare["rounds"], of_bare["found"], of_bare["met"]) == ([0.95, 0.94, 0.2], 0.94, True)
    assert (added["found"], added["met"]) == (2.0, True)
    assert bars["requests with an error or a wrong label"]["met"]
    assert bars["images/s, times slower's"]["met"]
    assert bars["p99 at saturation, share of slower's"]["met"]
    assert not bars["images/s, times faster's"]["met"]
    assert not bars["p99 at saturation, share of faster's"]["met"]
    assert result["quiet"]


def test_a_wrong_label_and_a_noisy_machine_are_reported() -> None:
    rounds = {BARE: [loop_round(100, 5)], SERVICE: [server_round(99, 5, 9, others=1.5, wrong=1)]}
    result = report.summarise(rounds)
    mistakes = next(bar for bar in result["bars"] if "wrong" in bar["name"])
    assert (mistakes["found"], mistakes["met"]) == (1, False)
    assert (result["quiet"], result["most_taken_by_others"]) == (False, 1.5)


def test_the_table_shows_every_contender_and_why_one_is_missing() -> None:
    rounds = {BARE: [loop_round(100, 5)], SERVICE: [server_round(95, 7, 40, others=1.0)]}
    entries: dict[str, dict[str, Any]] = {name: {"rounds": figures} for name, figures in rounds.items()}
    entries["bentoml"] = {"not_measured": "no index in reach"}
    document = {
        "settings": {"clients": 32, "rounds": 1},
        "contenders": entries,
        "result": report.summarise(rounds),
    }
    console = Console(file=io.StringIO(), width=140)
    report.show(document, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for text in (
        BARE,
        SERVICE,
        "95.0",
        "bentoml was not measured: no index in reach",
        "doubtful: other processes took up to 1",
    ):
        assert text in shown


# The rest


def test_generated_images_are_deterministic_and_as_large_as_photographs() -> None:
    data = make_image("moss", 1)
    assert data == make_image("moss", 1) != make_image("moss", 2)
    assert Image.open(io.BytesIO(data)).size == (WIDTH, HEIGHT)
    assert 8_000 < len(data) < 40_000


def test_peers_are_chosen_by_name() -> None:
    assert arguments(["--json", "x", "--peers", "none"]).peers == []
    assert arguments(["--json", "x", "--peers", "torch,bentoml"]).peers == ["torch", "bentoml"]
    assert arguments(["--json", "x"]).peers == ["torch", "litserve", "bentoml"]
    assert arguments(["--json", "x", "--peers", "naive"]).peers == ["torch", "litserve-torch", "bentoml-torch"]
    with pytest.raises(SystemExit):
        arguments(["--json", "x", "--peers", "triton"])
