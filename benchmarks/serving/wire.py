"""The load generator's HTTP/1.1: prebuilt requests and an incremental response parser."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

LONGEST_HEAD = 2**16
LONGEST_CHUNK_LINE = 2**10
NO_BODY = {204, 304}
BOUNDARY = b"openworld-serving-benchmark"


class BadResponse(ValueError):
    """The bytes are not an HTTP response."""


class Response(NamedTuple):
    """One response; `close` means that the connection ends after it."""

    status: int
    body: bytes
    close: bool


def raw_request(host: str, path: str, image: bytes) -> bytes:
    """A request with the image as its body."""
    return _request(host, path, b"image/jpeg", image)


def form_request(host: str, path: str, image: bytes, field: str) -> bytes:
    """A request with the image as a form file, like `curl -F`."""
    head = f'Content-Disposition: form-data; name="{field}"; filename="image.jpg"\r\nContent-Type: image/jpeg'.encode()
    body = b"--%b\r\n%b\r\n\r\n%b\r\n--%b--\r\n" % (BOUNDARY, head, image, BOUNDARY)
    return _request(host, path, b"multipart/form-data; boundary=" + BOUNDARY, body)


def _request(host: str, path: str, kind: bytes, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nAccept: application/json\r\nContent-Type: ".encode()
    return b"%b%b\r\nContent-Length: %d\r\n\r\n%b" % (head, kind, len(body), body)


@dataclass(frozen=True)
class _Head:
    status: int
    length: int | None
    chunked: bool
    close: bool

    @classmethod
    def parse(cls, text: bytes) -> _Head:
        first, *lines = text.split(b"\r\n")
        version, _, rest = first.partition(b" ")
        status = rest.partition(b" ")[0]
        if not version.startswith(b"HTTP/1.") or not status.isdigit():
            raise BadResponse(f"not a status line: {first[:80]!r}")
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        length = headers.get(b"content-length")
        if length is not None and not length.isdigit():
            raise BadResponse(f"not a length: {length[:40]!r}")
        chunked = headers.get(b"transfer-encoding", b"").endswith(b"chunked")
        connection = headers.get(b"connection", b"")
        close = b"close" in connection or (version == b"HTTP/1.0" and b"keep-alive" not in connection)
        return cls(int(status), None if chunked or length is None else int(length), chunked, close)


class ResponseReader:
    """Incremental parser, one per connection: feed it bytes, get complete responses."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._head: _Head | None = None
        self._chunks: list[bytes] = []

    def feed(self, data: bytes) -> list[Response]:
        self._buffer += data
        out = []
        while (response := self._next()) is not None:
            out.append(response)
        return out

    def end(self) -> Response | None:
        """Handle a closed connection: a response without a length ends here."""
        head = self._head
        if head is None or head.chunked or head.length is not None:
            return None
        return self._done(head, bytes(self._buffer))

    def _next(self) -> Response | None:
        while self._head is None:
            text = self._until(b"\r\n\r\n", LONGEST_HEAD)
            if text is None:
                return None
            head = _Head.parse(text)
            if head.status >= 200:  # skip 1xx interim responses
                self._head = head
        head = self._head
        body = self._body(head)
        return None if body is None else self._done(head, body)

    def _done(self, head: _Head, body: bytes) -> Response:
        self._head = None
        return Response(head.status, body, head.close or (head.length is None and not head.chunked))

    def _body(self, head: _Head) -> bytes | None:
        if head.status in NO_BODY:
            return b""
        if head.chunked:
            return self._chunked()
        return None if head.length is None else self._take(head.length)

    def _chunked(self) -> bytes | None:
        while True:
            end = self._buffer.find(b"\r\n")
            if end < 0:
                self._bound(LONGEST_CHUNK_LINE)
                return None
            try:
                size = int(bytes(self._buffer[:end]).partition(b";")[0], 16)
            except ValueError as error:
                raise BadResponse(f"not a chunk's size: {bytes(self._buffer[:40])!r}") from error
            if size == 0:
                return self._trailer(end)
            if len(self._buffer) < end + 2 + size + 2:
                return None
            self._chunks.append(bytes(self._buffer[end + 2 : end + 2 + size]))
            del self._buffer[: end + 2 + size + 2]

    def _trailer(self, end: int) -> bytes | None:
        """Skip the trailers after the last chunk."""
        stop = self._buffer.find(b"\r\n\r\n", end)
        if stop < 0:
            self._bound(LONGEST_HEAD)
            return None
        del self._buffer[: stop + 4]
        body, self._chunks = b"".join(self._chunks), []
        return body

    def _take(self, size: int) -> bytes | None:
        if len(self._buffer) < size:
            return None
        out = bytes(self._buffer[:size])
        del self._buffer[:size]
        return out

    def _until(self, mark: bytes, limit: int) -> bytes | None:
        end = self._buffer.find(mark)
        if end < 0:
            self._bound(limit)
            return None
        out = bytes(self._buffer[:end])
        del self._buffer[: end + len(mark)]
        return out

    def _bound(self, limit: int) -> None:
        if len(self._buffer) > limit:
            raise BadResponse(f"no end after {limit} bytes: {bytes(self._buffer[:80])!r}")
