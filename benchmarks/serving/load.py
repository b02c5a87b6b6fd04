"""`python -m benchmarks.serving.load`: the load generator, in its own process.

A closed loop: each of N keep-alive connections sends its next request after the response to the previous one. Prebuilt
requests and a small parser keep the generator cheap. It checks the status and the label of every response.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving.figures import Measured
from benchmarks.serving.wire import BadResponse, Response, ResponseReader, form_request, raw_request

HOST = "127.0.0.1"
PATH = "/predict"
FIELD = "images"
EXPECTED = "expected.json"
GRACE = 30.0  # seconds to wait for responses after the window ends
PAUSE = 0.05  # seconds before reconnecting


class Load:
    """State shared by all connections: next request, clock, counts."""

    def __init__(self, requests: Sequence[bytes], expected: Sequence[str | None], warm: float, seconds: float) -> None:
        self.requests, self._expected = requests, expected
        self._begins = time.perf_counter() + warm
        self.ends = self._begins + seconds
        self.over = False
        self._sent = 0
        self._latencies: list[float] = []
        self._answered = self._wrong = 0
        self.errors: Counter[str] = Counter()

    def next(self) -> int:
        """Index of the next request; all connections share one cycle over the images."""
        self._sent += 1
        return (self._sent - 1) % len(self.requests)

    def record(self, place: int, sent: float, response: Response) -> None:
        now = time.perf_counter()
        if response.status != 200:
            self.errors[str(response.status)] += 1
            return
        try:
            self._wrong += label_of(response.body) != self._expected[place]
        except (ValueError, KeyError, IndexError, TypeError):
            self.errors["unreadable answer"] += 1
            return
        self._answered += 1
        if self._begins <= now <= self.ends:
            self._latencies.append(now - sent)

    def measured(self, seconds: float) -> Measured:
        return Measured.of(
            self._latencies, seconds, answered=self._answered, wrong=self._wrong, errors=dict(self.errors)
        )


def label_of(body: bytes) -> str | None:
    """The label in a response with one prediction, in our format or as a list or object."""
    document: Any = json.loads(body)
    if isinstance(document, dict) and "predictions" in document:
        document = document["predictions"]
    if isinstance(document, list):
        document = document[0]
    label: str | None = document["label"]
    return label


class _Connection(asyncio.Protocol):
    def __init__(self, load: Load) -> None:
        self._load, self._reader = load, ResponseReader()
        self._place, self._sent = -1, 0.0  # -1: no pending request
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        if self._load.over:
            self._transport.close()
            return
        self._place, self._sent = self._load.next(), time.perf_counter()
        self._transport.write(self._load.requests[self._place])

    def data_received(self, data: bytes) -> None:
        try:
            responses = self._reader.feed(data)
        except BadResponse:
            self._load.errors["not HTTP"] += 1
            self._place = -1
            self._transport.abort()
            return
        for response in responses:
            self._finish(response)

    def _finish(self, response: Response) -> None:
        self._load.record(self._place, self._sent, response)
        self._place = -1
        if response.close:
            self._transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if self._place >= 0:
            last = self._reader.end()
            if last is not None:
                self._load.record(self._place, self._sent, last)
            else:
                self._load.errors["connection lost"] += 1
        if not self.closed.done():
            self.closed.set_result(None)


async def _client(load: Load, port: int) -> None:
    """One client: one connection, reopened when it breaks."""
    loop = asyncio.get_running_loop()
    while not load.over:
        try:
            _, connection = await loop.create_connection(lambda: _Connection(load), HOST, port)
        except OSError:
            load.errors["no connection"] += 1
            await asyncio.sleep(PAUSE)
            continue
        await connection.closed
        if not load.over:
            await asyncio.sleep(PAUSE)


async def run(
    port: int, requests: Sequence[bytes], expected: Sequence[str | None], clients: int, warm: float, seconds: float
) -> Measured:
    """Run `clients` connections for `warm` uncounted seconds, then `seconds` counted ones."""
    load = Load(requests, expected, warm, seconds)
    tasks = [asyncio.create_task(_client(load, port)) for _ in range(clients)]
    await asyncio.sleep(max(0.0, load.ends - time.perf_counter()))
    load.over = True
    _, late = await asyncio.wait(tasks, timeout=GRACE)
    for task in late:
        load.errors["never answered"] += 1
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return load.measured(seconds)


def requests_of(folder: Path, form: bool, host: str) -> tuple[list[bytes], list[str | None]]:
    """The requests for a workload's images, and the expected labels."""
    expected: dict[str, str | None] = json.loads((folder / EXPECTED).read_bytes())
    images = [(folder / name).read_bytes() for name in expected]
    if form:
        return [form_request(host, PATH, image, FIELD) for image in images], list(expected.values())
    return [raw_request(host, PATH, image) for image in images], list(expected.values())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.load", description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--images", type=Path, required=True, help=f"a folder with JPEG files and {EXPECTED}")
    parser.add_argument("--form", action="store_true", help="send forms instead of plain bodies")
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--warm", type=float, default=1.0)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    requests, expected = requests_of(args.images, args.form, f"{HOST}:{args.port}")
    measured = asyncio.run(run(args.port, requests, expected, args.clients, args.warm, args.seconds))
    print(json.dumps(measured.to_dict()))


if __name__ == "__main__":
    main()
