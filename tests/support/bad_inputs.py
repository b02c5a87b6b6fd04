"""Malformed and unusual requests, each with the response that it must get.

Sent over a plain socket, so that a case may break HTTP as well as an image. A case without a `code` succeeds.
"""

from __future__ import annotations

import base64
import gzip
import json
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from http.client import HTTPResponse
from typing import Any

from tests.support.bad_images import JPEG, MIB, PNG, WEBP, all_images

# Small limits keep "too large" cheap; the timeout is long because the machine may be busy.
LIMITS = {"max_body_bytes": 4 * MIB, "max_image_bytes": MIB, "max_request_images": 64, "request_timeout": 60}
FORM = "multipart/form-data; boundary=frontier"
JSON = "application/json"


@dataclass(frozen=True)
class Case:
    """One request and the expected response."""

    name: str
    status: int
    code: str = ""
    body: bytes = b""
    type: str | None = None
    method: str = "POST"
    path: str = "/predict"
    headers: tuple[tuple[str, str], ...] = ()
    chunked: bool = False  # send without Content-Length
    raw: bytes | None = None  # the whole request, for malformed HTTP

    def request(self) -> bytes:
        if self.raw is not None:
            return self.raw
        headers, body = [("Host", "127.0.0.1"), *self.headers], self.body
        if self.type is not None:
            headers.append(("Content-Type", self.type))
        if self.chunked:
            headers.append(("Transfer-Encoding", "chunked"))
            pieces = [body[at : at + 65536] for at in range(0, len(body), 65536)]
            body = b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
        elif body:
            headers.append(("Content-Length", str(len(body))))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        return f"{self.method} {self.path} HTTP/1.1\r\n{lines}\r\n".encode("latin-1") + body


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def send(address: tuple[str, int], case: Case, seconds: float = 20) -> Reply:
    """Send a case on a new connection and return the response."""
    with socket.create_connection(address, timeout=seconds) as connection:
        connection.sendall(case.request())
        with HTTPResponse(connection, method=case.method) as response:
            response.begin()
            body = response.read()
            return Reply(response.status, {name.lower(): value for name, value in response.getheaders()}, body)


def images() -> Iterator[Case]:
    for image in all_images():
        yield Case(image.name, image.status, image.code, image.data, "image/jpeg")
    for kind in (None, "", "image/png", "image/gif", "application/octet-stream", ";;;"):
        yield Case(f"jpeg called {str(kind)[:30]!r}", 200, body=JPEG, type=kind)
    for kind in ("text/html", "a" * 5000, "é/é"):
        yield Case(f"jpeg called {kind[:30]!r}", 415, "unsupported_body", JPEG, kind)
    for name, data in {"png": PNG, "webp": WEBP}.items():
        yield Case(f"{name} called image/jpeg", 200, body=data, type="image/jpeg")
    # The content type that curl sends by default.
    yield Case("jpeg called a form", 200, body=JPEG, type="application/x-www-form-urlencoded")
    yield Case("text called image/png", 415, "unsupported_image", b"hello", "image/png")


# Forms


def file(data: bytes, field: str = "images", more: bytes = b"") -> bytes:
    head = f'Content-Disposition: form-data; name="{field}"; filename="a.png"\r\n'.encode()
    return head + more + b"\r\n" + data + b"\r\n"


def form(*parts: bytes, end: bytes = b"--frontier--\r\n") -> bytes:
    return b"".join(b"--frontier\r\n" + part for part in parts) + end


def forms() -> Iterator[Case]:
    good, text = file(PNG), b'Content-Disposition: form-data; name="images"\r\n\r\nhello\r\n'
    nested = b"Content-Type: multipart/mixed; boundary=inner\r\n"
    refused: dict[str, tuple[str, bytes]] = {
        "no boundary": ("multipart/form-data", form(good)),
        "an empty boundary": ("multipart/form-data; boundary=", form(good)),
        "a wrong boundary": ("multipart/form-data; boundary=other", form(good)),
        "a boundary of 50 kB": (f"multipart/form-data; boundary={'b' * 50_000}", form(good)),
        "no final boundary": (FORM, form(good, end=b"")),
        "no final boundary after the second file": (FORM, form(good, good, end=b"")),
        "an end in the middle of the second file": (FORM, form(good, good)[:-500]),
        "half of its final boundary": (FORM, form(good, end=b"--fron")),
        "a final boundary without its dashes": (FORM, form(good, end=b"--frontier\r\n")),
        "nothing in it": (FORM, b""),
        "text in place of parts": (FORM, b"this is no form"),
        "a line before its boundary": (FORM, b"preamble\r\n" + form(good)),
        "a part without a name": (FORM, form(good.replace(b'name="images"; ', b""))),
        "a part without headers": (FORM, form(b"\r\n" + PNG + b"\r\n")),
        "a part without a disposition": (FORM, form(b"Content-Type: image/png\r\n\r\n" + PNG + b"\r\n")),
        "a header without a colon": (FORM, form(b"nonsense\r\n" + good)),
        "a header name of control bytes": (FORM, form(b"\0\1\2: x\r\n" + good)),
        "a header of 100 kB": (FORM, form(file(PNG, more=b"X-Long: " + b"a" * 100_000 + b"\r\n"))),
        "10000 headers": (FORM, form(file(PNG, more=b"X: y\r\n" * 10_000))),
        "bare newlines": (FORM, form(good).replace(b"\r\n", b"\n")),
        "a text field": (FORM, form(text)),
        "a text field beside a file": (FORM, form(good, text)),
        "a text field of 100 kB": (FORM, form(text.replace(b"hello", b"a" * 100_000))),
        "65 text fields": (FORM, form(*[text] * 65)),
        "an unknown field": (FORM, form(file(PNG, "photo"))),
        "a field without a name": (FORM, form(file(PNG, ""))),
        "a field name of 50 kB": (FORM, form(file(PNG, "n" * 50_000))),
        "a form inside": (FORM, form(b'Content-Disposition: form-data; name="images"\r\n' + nested + b"\r\n" + good)),
    }
    for name, (kind, body) in refused.items():
        yield Case(f"form with {name}", 400, "bad_request", body, kind)
    yield Case("form with nothing but its end", 422, "no_images", form(), FORM)
    yield Case("form with 65 files", 413, "body_too_large", form(*[file(b"")] * 65), FORM)
    yield Case("form with a file of no bytes", 415, "unsupported_image", form(file(b"")), FORM)
    yield Case("form with a file of text", 415, "unsupported_image", form(file(b"hello")), FORM)
    yield Case("form with a cut file", 422, "broken_image", form(file(PNG[:999])), FORM)
    yield Case("form with a file beyond the limit", 413, "image_too_large", form(file(PNG + bytes(MIB))), FORM)
    yield Case(
        "form with more bytes than a request may have", 413, "body_too_large", form(*[file(bytes(MIB))] * 5), FORM
    )
    yield Case("form with files of both names", 200, body=form(good, file(PNG, "image")), type=FORM)
    yield Case(
        "form in capitals", 200, body=form(good), type=FORM.replace("multipart/form-data", "Multipart/FORM-Data")
    )
    yield Case("form with something after its end", 200, body=form(good) + b"epilogue", type=FORM)
    for charset in ("hex", "idna", "zlib", "no-such-thing"):
        yield Case(f"form in {charset}", 200, body=form(good), type=f"{FORM}; charset={charset}")
    yield Case("form in utf-16", 400, "bad_request", form(good), f"{FORM}; charset=utf-16")


# JSON


def documents() -> Iterator[Case]:
    good, deep = base64.b64encode(PNG).decode(), 100_000
    refused: dict[str, bytes | object] = {
        "nothing in it": b"",
        "text": b"hello",
        "an image": PNG,
        "an open bracket": b'{"images": [',
        "a comma at the end": b'{"images": ["aGk="],}',
        "single quotes": b"{'images': []}",
        "a comment": b'{"images": [] /* none */}',
        "a byte order mark": b"\xef\xbb\xbf" + b'{"images": []}',
        "utf-16": '{"images": []}'.encode("utf-16"),
        "bytes that are not utf-8": b'{"images": ["\xff\xfe"]}',
        "half a surrogate": b'{"images": ["\\ud800"]}',
        "two documents": b'{"images": []}{"images": []}',
        "null": None,
        "a number": 7,
        "a string": good,
        "a list": [good],
        "an empty object": {},
        "images of null": {"images": None},
        "images of a string": {"images": good},
        "images of an object": {"images": {"0": good}},
        "images of a number": {"images": 7},
        "an image of null": {"images": [None]},
        "an image of a number": {"images": [7]},
        "an image of an object": {"images": [{"data": good}]},
        "an image of a list": {"images": [[good]]},
        "one image of several of the wrong type": {"images": [good, True]},
        "another key": {"image": [good]},
        "one key too many": {"images": [good], "version": 1},
        "its key in capitals": {"IMAGES": [good]},
        "NaN": b'{"images": NaN}',
        "NaN for an image": b'{"images": [NaN]}',
        "infinity": b'{"images": [-Infinity]}',
        "a number of 10000 digits": b'{"images": [' + b"9" * 10_000 + b"]}",
        "100000 open lists": b"[" * deep,
        "100000 lists": b'{"images": ' + b"[" * deep + b"]" * deep + b"}",
        "100000 objects": b'{"images":' * deep + b"1" + b"}" * deep,
    }
    for name, document in refused.items():
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        yield Case(f"json of {name}", 400, "bad_request", body, JSON)

    def images(name: str, status: int, code: str, *texts: str) -> Case:
        return Case(f"json with {name}", status, code, json.dumps({"images": texts}).encode(), JSON)

    yield images("no images", 422, "no_images")
    yield images("65 images", 413, "body_too_large", *[good] * 65)
    yield images("a million images", 413, "body_too_large", *[""] * 1_000_000)
    yield images("an image of no bytes", 415, "unsupported_image", "")
    yield images("text in base64", 415, "unsupported_image", "aGVsbG8=")
    yield images("a cut image", 422, "broken_image", good[:1200])
    yield images("an image beyond the limit", 413, "image_too_large", base64.b64encode(PNG + bytes(MIB)).decode())
    webp = base64.b64encode(b"RIFF\xfb\xff\xfe\0WEBP" + WEBP).decode()
    broken = {
        "too much padding": good + "=",
        "no padding": base64.b64encode(PNG + b"0").decode().rstrip("="),
        "padding in the middle": "aGk=" + good,
        "a length of one": "a",
        "nothing but padding": "====",
        "spaces": f" {good}",
        "lines": "\n".join(good[at : at + 76] for at in range(0, len(good), 76)),
        "the alphabet of urls": webp.replace("+", "-").replace("/", "_"),
        "other letters": "été",
        "a zero": "\0" + good,
        "percent signs": good.replace("+", "%2B"),
        "a data url inside a data url": f"data:image/png;base64,data:image/png;base64,{good}",
        "a data url without base64": "data:image/png,%89PNG",
        "a data url cut short": "data:image/png;base64",
        "a data url with a long type": f"data:{'a' * 300};base64,{good}",
    }
    for name, text in broken.items():
        yield images(name, 422, "bad_base64", text)
    yield images("a data url", 200, "", f"data:image/png;base64,{good}")
    yield images("a data url of another type", 200, "", f"data:text/html;charset=utf-8;base64,{good}")
    yield images("64 images", 200, "", *[good] * 64)
    yield Case(
        "json in another charset", 200, body=b'{"images": ["%s"]}' % good.encode(), type=f"{JSON}; charset=latin-1"
    )
    yield Case("json with its key twice", 200, body=b'{"images": 1, "images": ["%s"]}' % good.encode(), type=JSON)


# HTTP


def requests() -> Iterator[Case]:
    zeros = bytes(5 * MIB)
    for kind, body in (("image/jpeg", zeros), (FORM, form(file(zeros))), (JSON, b'{"images": ["%s"]}' % zeros)):
        for chunked in (False, True):
            how = " in chunks" if chunked else ""
            yield Case(f"{kind[:12]} of 5 MiB{how}", 413, "body_too_large", body, kind, chunked=chunked)
    yield Case("an image in chunks", 200, body=JPEG, chunked=True)
    for coding in ("gzip", "br", "deflate", "zstd", "identity, gzip", "nonsense"):
        body, headers = gzip.compress(JPEG), (("Content-Encoding", coding),)
        yield Case(f"content-encoding {coding}", 400, "bad_request", body, headers=headers)
    yield Case("content-encoding identity", 200, body=JPEG, headers=(("Content-Encoding", "Identity"),))
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        yield Case(f"{method} /predict", 405, "method_not_allowed", method=method)
    for method, path in (
        ("POST", "/livez"),
        ("DELETE", "/metrics"),
        ("PUT", "/versions"),
        ("GET", "/versions/1/activate"),
    ):
        yield Case(f"{method} {path}", 405, "method_not_allowed", method=method, path=path)
    paths = (
        "/nothing",
        "/predict/1",
        "/..%2f..%2fetc/passwd",
        "//predict",
        "/%00",
        "/%ff%fe",
        "/PREDICT",
        "/versions/1/2",
    )
    for path in (*paths, "/" + "a" * 30_000, "/versions/../../etc/passwd", "/predict;a=b", "/.env", "/v2/health/none"):
        yield Case(f"POST {path[:30]}", 404, "not_found", b"{}", JSON, path=path)
    for number in ("0", "-1", "abc", "1e400", "", "1.5", "1,2", "null", "NaN", "9" * 30, "9" * 5000, "%00", "0x1"):
        yield Case(f"?version={number[:31]}", 422, "invalid", JPEG, path=f"/predict?version={number}")
        if number:
            yield Case(f"activate {number[:31]}", 422, "invalid", path=f"/versions/{number}/activate")
    for number in ("999", "1000000000000"):
        yield Case(f"?version={number}", 404, "not_found", JPEG, path=f"/predict?version={number}")
        yield Case(f"activate {number}", 404, "not_found", path=f"/versions/{number}/activate")
    yield Case("a reason of 501 letters", 422, "invalid", path=f"/versions/1/activate?reason={'a' * 501}")
    yield Case("unknown parameters", 200, body=JPEG, path="/predict?versions=9&version[]=9&%ff=%00&=&&&")
    for seconds in ("0", "-1", "nan", "inf", "-inf", "abc", "", "1e400", "1e7", "1,5", "1s", "9" * 5000):
        yield Case(f"timeout {seconds[:9]!r}", 422, "invalid", JPEG, headers=(("X-Request-Timeout", seconds),))
    for given in ("<script>", "a b", "x" * 65, "é", "../..", "%0d%0aSet-Cookie: a=b"):
        yield Case(f"request id {given[:20]!r}", 415, "unsupported_image", b"x", headers=(("X-Request-ID", given),))
    yield Case("7 headers of 8 kB", 200, body=JPEG, headers=tuple((f"X-{n}", "a" * 8000) for n in range(7)))
    yield Case("100 headers of 8 kB", 400, body=JPEG, headers=tuple((f"X-{n}", "a" * 8000) for n in range(100)))
    yield Case("a header of 1 MB", 400, body=JPEG, headers=(("X-Long", "a" * MIB),))
    yield Case("a key that is not needed", 200, body=JPEG, headers=(("Authorization", "Bearer \xff\xfe"),))
    yield Case("a slash too many", 307, body=JPEG, path="/predict/")


def broken_http() -> Iterator[Case]:
    post = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    chunked = post + b"Transfer-Encoding: chunked\r\n\r\n"
    get = b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    refused = {
        "a garbage line": b"\x00\x01garbage\r\n\r\n",
        "a word": b"hello\r\n\r\n",
        "an unknown method": b"FROB /livez HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "a tls greeting": b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03" + bytes(100),
        "the preface of http 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "http 9.9": b"GET /livez HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
        "a path of bytes": b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "a path of 100 kB": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        "connect": b"CONNECT robot:80 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        "two lengths": post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        "a length and chunks": post + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        "a negative length": post + b"Content-Length: -5\r\n\r\nhello",
        "a length of letters": post + b"Content-Length: five\r\n\r\nhello",
        "a length of 30 digits": post + b"Content-Length: " + b"9" * 30 + b"\r\n\r\nhello",
        "a chunk size of letters": chunked + b"zz\r\nhello\r\n0\r\n\r\n",
        "a chunk size of 20 digits": chunked + b"f" * 20 + b"\r\nhello\r\n0\r\n\r\n",
        "a chunk longer than it says": chunked + b"2\r\nhello\r\n0\r\n\r\n",
        "an unknown transfer coding": post + b"Transfer-Encoding: gzip\r\n\r\nhello",
        "a zero in a header": get + b"X: a\0b\r\n\r\n",
        "a space in a header's name": get + b"X Y: z\r\n\r\n",
        "a folded header": get + b"X: y\r\n z\r\n\r\n",
        "a header without a name": get + b": y\r\n\r\n",
    }
    for name, raw in refused.items():
        yield Case(f"http with {name}", 400, raw=raw)
    huge = post + b"Content-Length: 999999999999\r\n"
    yield Case("a length of a terabyte", 413, "body_too_large", raw=huge + b"\r\nhello")
    yield Case("a terabyte that waits for leave", 413, "body_too_large", raw=huge + b"Expect: 100-continue\r\n\r\n")
    yield Case("no host", 200, raw=b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n")
    yield Case("http 1.0", 200, raw=b"GET /livez HTTP/1.0\r\n\r\n")
    upgrade = (
        b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
    )
    yield Case("a web socket", 200, raw=get + upgrade)


@cache
def corpus() -> tuple[Case, ...]:
    """All cases, with unique names."""
    return (*images(), *forms(), *documents(), *requests(), *broken_http())
