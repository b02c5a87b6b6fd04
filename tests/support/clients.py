"""One call of the synchronous or the asynchronous client."""

from __future__ import annotations

import asyncio
from typing import Any

from service.client import AsyncClient, Client

KEY = "a-secret-of-the-tests-0123456789"


def call(kind: str, url: str, method: str, *arguments: Any, **named: Any) -> Any:
    """Call a method of a new client; `key` and `client_timeout` are arguments of the client."""
    own = (url, named.pop("key", KEY), named.pop("client_timeout", 30.0))
    if kind == "sync":
        with Client(*own) as client:
            return getattr(client, method)(*arguments, **named)

    async def with_asyncio() -> Any:
        async with AsyncClient(*own) as client:
            return await getattr(client, method)(*arguments, **named)

    return asyncio.run(with_asyncio())
