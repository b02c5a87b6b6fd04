"""Attacks on a server: each repeats one kind of abuse over many connections until its time is over.

Loopback only: `attack` connects to 127.0.0.1 and nowhere else. Attacks with a key use one key, which is not that of the
well-behaved client.
"""

from __future__ import annotations

import asyncio
import io
import os
import random
import resource
import struct
import zipfile
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.synchronize import Event
from typing import Any

from PIL import Image

from benchmarks.serving.load import HOST

NICE = 19
PAUSE, HOLD_PAUSE = 0.2, 1.0  # seconds before a worker sends again, and before it holds another connection
ANSWER_SECONDS = 30.0
BOMB_SIDE = 7000  # pixels: just below the default limit of an image
SLOWLORIS, STALLED, PNGS, STREAMS, PINNED, IDLE = 500, 300, 16, 300, 64, 2000  # connections
ZIPS = 4
MANY_MEMBERS = 300_000


@dataclass
class Abuser:
    """One attacking process: where it sends, its key, and what it got."""

    port: int
    key: str
    task: str  # a task that has not ended, for its events
    versions: Sequence[int]
    outcomes: Counter[str] = field(default_factory=Counter)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(HOST, self.port)

    def head(self, method: str, path: str, length: int = 0, kind: str = "image/png", more: str = "") -> bytes:
        return (
            f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nAuthorization: Bearer {self.key}\r\n{more}"
            f"Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    async def send(self, *parts: bytes) -> str:
        """Send a request on a new connection; returns the status."""
        reader, writer = await self.connect()
        try:
            for part in parts:
                writer.write(part)
            async with asyncio.timeout(ANSWER_SECONDS):
                await writer.drain()
                line = await reader.readline()
            return line.split()[1].decode() if line else "closed"
        finally:
            writer.close()

    async def hold(self, *sent: bytes, drip: bytes = b"") -> str:
        """Open a connection, send, and wait until the server answers or closes; send `drip` every second."""
        reader, writer = await self.connect()
        try:
            for part in sent:
                writer.write(part)
            answer = asyncio.ensure_future(reader.read(2**16))
            while not answer.done():
                await asyncio.wait({answer}, timeout=1.0 if drip else None)
                if not answer.done():
                    writer.write(drip)
            return answer.result().split()[1].decode() if answer.result() else "closed"
        finally:
            writer.close()


Step = Callable[[Abuser, int], Awaitable[str]]


async def slowloris(abuser: Abuser, number: int) -> str:
    return await abuser.hold(b"GET /livez HTTP/1.1\r\nHost: a\r\nX-A: ", drip=b"a")


async def stalled_body(abuser: Abuser, number: int) -> str:
    method, path, kind = (
        ("POST", "/predict", "image/png"),
        ("POST", "/tasks", "application/zip"),
        ("POST", "/tasks", "multipart/form-data; boundary=b"),
        ("PATCH", "/classes/moss", "application/json"),
    )[number % 4]
    return await abuser.hold(abuser.head(method, path, 10**6, kind, "X-Request-Timeout: 60\r\n"), b"{")


async def zip_bomb(abuser: Abuser, number: int) -> str:
    bomb = (many_members, one_large_member, many_large_images)[number % 3]()
    return await abuser.send(abuser.head("POST", "/tasks", len(bomb), "application/zip"), bomb)


async def png_bomb(abuser: Abuser, number: int) -> str:
    whole = png(BOMB_SIDE)
    bomb = (whole, whole[:-1000], whole[:16] + struct.pack(">II", 60_000, 60_000) + whole[24:])[number % 3]
    return await abuser.send(abuser.head("POST", "/predict", len(bomb)), bomb)


async def event_stream(abuser: Abuser, number: int) -> str:
    reader, writer = await abuser.connect()
    try:
        writer.write(abuser.head("GET", f"/tasks/{abuser.task}/events"))
        status = (await reader.readline()).split()[1].decode()
        while status == "200" and await reader.read(2**16):
            pass
        return status
    finally:
        writer.close()


async def pinned_version(abuser: Abuser, number: int) -> str:
    version, image = abuser.versions[number % len(abuser.versions)], png(64)
    path, more = f"/predict?version={version}", "X-Request-Timeout: 0.05\r\n"
    return await abuser.send(abuser.head("POST", path, len(image), more=more), image)


async def idle_connection(abuser: Abuser, number: int) -> str:
    return await abuser.hold()


HOLDING = (slowloris, stalled_body, event_stream, idle_connection)
ATTACKS: dict[str, tuple[int, Step]] = {
    "slowloris": (SLOWLORIS, slowloris),
    "stalled bodies": (STALLED, stalled_body),
    "zip bombs": (ZIPS, zip_bomb),
    "png bombs": (PNGS, png_bomb),
    "event streams": (STREAMS, event_stream),
    "pinned versions": (PINNED, pinned_version),
    "idle connections": (IDLE, idle_connection),
}


async def _repeat(abuser: Abuser, name: str, seconds: float) -> None:
    workers, step = ATTACKS[name]

    async def worker(number: int) -> None:
        pause = HOLD_PAUSE if step in HOLDING else PAUSE
        await asyncio.sleep(random.uniform(0, HOLD_PAUSE))  # workers are independent clients, not one burst
        while True:
            try:
                abuser.outcomes[await step(abuser, number)] += 1
            except (OSError, IndexError, TimeoutError):
                abuser.outcomes["error"] += 1
            await asyncio.sleep(random.uniform(0.5, 1.5) * pause)

    tasks = [asyncio.create_task(worker(number)) for number in range(workers)]
    await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def attack(name: str, abuser: Abuser, seconds: float, begun: Event, results: Any) -> None:
    """Run one attack in this process, at the lowest priority, and set `begun`; put the number of answers by status."""
    os.nice(NICE)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if name in ("zip bombs", "png bombs"):
        for make in (many_members, one_large_member, many_large_images):
            make()
    begun.set()
    asyncio.run(_repeat(abuser, name, seconds))
    results.put(dict(sorted(abuser.outcomes.items())))


@cache
def png(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGBA", (side, side), (9, 99, 199, 99)).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


@cache
def many_members() -> bytes:
    """A zip that is only a directory: 300,000 empty members, of which its end record admits 65,535."""
    entry = struct.pack("<4s24xHHH12x", b"PK\1\2", 5, 0, 0) + b"a/b.p"
    directory = entry * MANY_MEMBERS
    return directory + struct.pack("<4s4xHHLLH", b"PK\5\6", 0xFFFF, 0xFFFF, len(directory), 0, 0)


@cache
def one_large_member() -> bytes:
    """A zip whose one image expands to half a gigabyte."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("cat/1.png", "w") as member:
        for _ in range(512):
            member.write(bytes(2**20))
    return buffer.getvalue()


@cache
def many_large_images() -> bytes:
    """A zip of images that each take a second to decode; their bytes differ after the end of the image."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for number in range(6):
            archive.writestr(f"bomb/{number}.png", png(BOMB_SIDE) + bytes([number]))
    return buffer.getvalue()
