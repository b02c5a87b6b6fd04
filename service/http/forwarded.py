"""Headers in which a reverse proxy forwards what it knows of the client."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class ForwardedHeaders:
    """Reads X-Forwarded-For, X-Forwarded-Proto and X-Forwarded-Host of trusted proxies; ignores those of others.

    Sets `client` and `scheme` of the scope, and adds `forwarded_host`. A proxy appends to these headers, so the last
    entry that is not itself a trusted proxy is the client. The entries before it can be forged.
    """

    def __init__(self, app: ASGIApp, proxies: Sequence[Network]) -> None:
        self._app, self._proxies = app, tuple(proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._proxies and self._is_proxy((scope.get("client") or ("",))[0]):
            headers = Headers(scope=scope)
            if addresses := _entries(headers, "x-forwarded-for"):
                client = next((one for one in reversed(addresses) if not self._is_proxy(one)), addresses[0])
                scope["client"] = (client, 0)
            if (scheme := _last(headers, "x-forwarded-proto").lower()) in ("http", "https"):
                scope["scheme"] = scheme
            scope["forwarded_host"] = _last(headers, "x-forwarded-host")
        await self._app(scope, receive, send)

    def _is_proxy(self, address: str) -> bool:
        try:
            ip = ipaddress.ip_address(address)
        except ValueError:
            return False
        if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
            ip = ip.ipv4_mapped  # an IPv4 client of a socket that listens on both
        return any(ip in network for network in self._proxies)


def _entries(headers: Headers, name: str) -> list[str]:
    return [one.strip() for value in headers.getlist(name) for one in value.split(",") if one.strip()]


def _last(headers: Headers, name: str) -> str:
    return next(reversed(_entries(headers, name)), "")
