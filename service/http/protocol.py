"""HTTP as uvicorn speaks it, but headers come to an end: its parser takes as many as are sent."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEADERS = 64 * 2**10  # bytes of a request that are not its body: headers, and trailers after it


class BoundedHeaders(HttpToolsProtocol):
    """Refuses a request whose headers do not end, be they many or one, before its body or after it."""

    _seen = 0  # bytes since the last of a body, or the last request

    def data_received(self, data: bytes) -> None:
        self._seen += len(data)
        super().data_received(data)
        if self._seen > MAX_HEADERS and not self.transport.is_closing():
            self.send_400_response(f"The headers have more than {MAX_HEADERS} bytes.")

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > MAX_HEADERS:
            raise ValueError("too large")  # the parser makes it a malformed request, which is answered with 400
        self._seen = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._seen = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._seen = 0
        super().on_message_complete()
