"""The well-behaved client: a robot that sends one image after the other, in a process of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from http.client import HTTPConnection, HTTPException
from multiprocessing.synchronize import Event
from typing import Any

from benchmarks.serving.figures import percentile
from benchmarks.serving.load import HOST

CLIENT_KEY = "robot-key-0123456789"
RATE = 20.0  # requests per second
NEW_CONNECTION_EVERY = 5
LEAD_SECONDS = 2.0  # of an attack before the client is measured
TIMEOUT = 30.0


def ask(port: int, images: Sequence[bytes], seconds: float, begun: Event | None, results: Any) -> None:
    """Send one image after the other, at most RATE per second; put statuses and latencies in milliseconds.

    `begun` is set when the attack begins; None: without an attack.
    """
    headers = {"X-API-Key": CLIENT_KEY, "Content-Type": "image/jpeg"}
    statuses, latencies, reconnects = Counter[str](), list[float](), 0
    if begun is not None:
        begun.wait(TIMEOUT)
        time.sleep(LEAD_SECONDS)
    connection = HTTPConnection(HOST, port, timeout=TIMEOUT)
    started = time.perf_counter()
    for number in range(int(RATE * seconds)):
        time.sleep(max(0.0, started + number / RATE - time.perf_counter()))
        sent = time.perf_counter()
        if number % NEW_CONNECTION_EVERY == 0:
            connection.close()
        for attempt in range(2):  # an idle connection may be closed by the server, as our clients expect
            try:
                connection.request("POST", "/predict", images[number % len(images)], headers)
                response = connection.getresponse()
                response.read()
                statuses[str(response.status)] += 1
                break
            except (OSError, HTTPException) as error:
                connection.close()
                reconnects += attempt == 0
                if attempt:
                    statuses[type(error).__name__] += 1
        latencies.append(1000 * (time.perf_counter() - sent))
    results.put({"statuses": dict(statuses), "reconnects": reconnects, "latencies": latencies})


def figures(found: dict[str, Any]) -> dict[str, Any]:
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "slowest_ms": 1.0}
    latencies = found.pop("latencies")
    return {**found, **{name: round(percentile(latencies, share), 1) for name, share in shares.items()}}
