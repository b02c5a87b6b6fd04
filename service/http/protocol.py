"""uvicorn's HTTP protocol with a limit on headers, which uvicorn itself does not have."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS = 64 * 2**10  # bytes of headers, and of trailers after a body


class BoundedHeaders(HttpToolsProtocol):
    """Rejects a request with too many bytes of headers or trailers."""

    _seen = 0  # bytes since the last body chunk or request

    def data_received(self, data: bytes) -> None:
        self._seen += len(data)
        super().data_received(data)
        if self._seen > MAX_HEADERS and not self.transport.is_closing():
            self.send_400_response(f"the headers have more than {MAX_HEADERS} bytes")

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADERS:
            raise ValueError("too large")  # the parser then answers 400
        self._seen = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._seen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._seen = 0
        super().on_message_complete()
