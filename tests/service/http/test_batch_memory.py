"""A submitted batch is spooled to disk: memory does not grow with its size."""

import asyncio
import json
import tempfile
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.requests import Request

from service.http.batch_bodies import FindImage, ReceivedBatch, receive_batch
from service.http.bodies import Pace
from service.http.limits import Admission, Quota
from tasks.batch import BatchLimits
from tests.support.images import make_image

COUNT, SIZE = 200, (192, 192)
ONE = len(make_image(0, SIZE, "PNG"))  # about 110 kB: less than Starlette keeps of a file in memory


def form_body() -> Iterator[bytes]:
    for seed in range(COUNT):
        head = f'--limit\r\nContent-Disposition: form-data; name="cat"; filename="{seed}.png"\r\n\r\n'
        yield head.encode()
        yield make_image(seed, SIZE, "PNG")
        yield b"\r\n"
    yield b"--limit--\r\n"


def request_of(content_type: str, body: Iterator[bytes]) -> Request:
    async def receive() -> dict[str, object]:
        chunk = next(body, None)
        return {"type": "http.request", "body": chunk or b"", "more_body": chunk is not None}

    headers = [(b"content-type", content_type.encode())]
    return Request({"type": "http", "method": "POST", "path": "/tasks", "headers": headers}, receive)  # type: ignore[arg-type]


@asynccontextmanager
async def received(request: Request, find_image: FindImage = lambda id: None) -> AsyncIterator[ReceivedBatch]:
    quota, folder = Quota(1, 2**30), Path(tempfile.gettempdir())
    with Admission(quota, quota, lambda: 1.0).enter("ann") as permit:
        async with receive_batch(request, BatchLimits(), permit, Pace(1, 60, 60), folder, find_image) as found:
            yield found


async def read_all(request: Request) -> int:
    """Check the batch and read every image again; return its bytes."""
    async with received(request) as found:
        batch = found.check([])
        assert (len(batch.images), found.ids) == (COUNT, [])
        return sum(len(batch.read(image.sha256)) for image in batch.images)


def test_every_file_of_a_form_is_read_as_it_was_sent() -> None:
    assert asyncio.run(read_all(request_of("multipart/form-data; boundary=limit", form_body()))) == sum(
        len(make_image(seed, SIZE, "PNG")) for seed in range(COUNT)
    )


def test_the_memory_of_a_form_does_not_grow_with_its_files() -> None:
    tracemalloc.start()
    try:
        total = asyncio.run(read_all(request_of("multipart/form-data; boundary=limit", form_body())))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total > COUNT * ONE * 0.9
    assert peak < 10 * ONE + COUNT * 8192
    assert peak < total / 5


def test_an_image_that_leaves_the_inbox_after_the_check_is_still_read() -> None:
    images = [make_image(seed) for seed in range(3)]
    inbox = {f"id {seed}": image for seed, image in enumerate(images)}
    body = json.dumps({"classes": {"cat": [*inbox, "id 0"]}}).encode()

    async def read() -> None:
        request = request_of("application/json", iter([body]))
        async with received(request, lambda id: inbox.pop(id, None)) as found:
            batch = found.check([])
            assert not inbox
            assert batch.duplicates == 1
            assert {batch.read(image.sha256) for image in batch.images} == set(images)

    asyncio.run(read())
