"""Refuses requests that a page of another site makes a browser send.

A browser attaches no key of ours to such a request, but it reaches servers that the page's author cannot reach: one
without keys on the same machine, for example.

    Host             must be a name of this server. A name of another site can be made to point here (DNS rebinding):
                     then the browser takes this server for a part of that site.
    Origin           the site of the page. It must be this server's own, or a trusted one.
    Sec-Fetch-Site   the browser's own judgement, sent also where there is no Origin.

Programs send neither Origin nor Sec-Fetch-Site, and are not affected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from service.errors import ForeignOrigin, ServiceError, UnknownHost
from service.http.problems import on_openworld_error
from service.settings import is_loopback

SAFE_METHODS = {"GET", "HEAD", "OPTIONS", "TRACE"}
# `same-site` includes other ports of this host, which belong to other programs. `none`: typed in by a person.
OWN_SITE = {"same-origin", "none"}
DEFAULT_PORTS = {"http": ":80", "https": ":443"}


class OriginGuard:
    """Checks Host, Origin and Sec-Fetch-Site. `any_host` tells whether every Host is accepted."""

    def __init__(
        self, app: ASGIApp, hosts: Collection[str], origins: Collection[str], any_host: Callable[[], bool]
    ) -> None:
        self._app, self._hosts, self._origins, self._any_host = app, hosts, origins, any_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._check(scope)
            except ServiceError as error:
                request = Request(scope, receive)
                response = await on_openworld_error(request, error)
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        hosts = headers.getlist("host")  # none: an HTTP/1.0 program, never a browser
        if forwarded := scope.get("forwarded_host"):
            hosts.append(forwarded)  # in addition to Host: a page can set this header to what it likes
        if not self._any_host() and (unknown := [host for host in hosts if not self._is_known(host)]):
            raise UnknownHost(
                f"this server has no name {unknown[0][:100]!r}: use 127.0.0.1 or localhost, or add the name to "
                "OPENWORLD_SERVE_TRUSTED_HOSTS"
            )
        origins = headers.getlist("origin")
        for origin in origins:
            if origin not in self._origins and not any(_is_origin_of(origin, host) for host in hosts):
                raise ForeignOrigin(
                    f"a page of {origin[:100]!r} may not use this server: if it is yours, add it to "
                    "OPENWORLD_SERVE_TRUSTED_ORIGINS"
                )
        trusted = bool(origins) and all(origin in self._origins for origin in origins)
        if scope["method"] not in SAFE_METHODS and not trusted:
            for site in headers.getlist("sec-fetch-site"):
                if site not in OWN_SITE:
                    raise ForeignOrigin(f"a page of another site may not use this server (Sec-Fetch-Site: {site[:20]})")

    def _is_known(self, host: str) -> bool:
        name = _without_port(host).lower().removesuffix(".")
        return name in self._hosts or is_loopback(name[1:-1] if name.startswith("[") and name.endswith("]") else name)


def _without_port(host: str) -> str:
    name, _, port = host.rpartition(":")
    return name if name and port.isdecimal() and (":" not in name or name.endswith("]")) else host


def _is_origin_of(origin: str, host: str) -> bool:
    """Whether the origin is http:// or https:// and this host with the same port. A proxy may have removed TLS."""
    scheme, _, authority = origin.lower().partition("://")
    default = DEFAULT_PORTS.get(scheme)
    return default is not None and authority.removesuffix(default) == host.lower().removesuffix(default) != ""
