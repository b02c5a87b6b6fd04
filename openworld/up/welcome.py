"""When the service answers, and what somebody who has just started it wants to know."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from contextlib import suppress
from http.client import HTTPConnection, HTTPException
from typing import TYPE_CHECKING

from models.backoff import Backoff
from models.errors import StoreError
from models.versions.store import VersionStore
from openworld import remote

if TYPE_CHECKING:
    from service.settings import ServiceSettings
    from trainer.worker.settings import WorkerSettings

FIRST_LOOK, LONGEST_LOOK = 0.05, 2.0  # seconds between two questions to a server that is not ready
ANSWER = 2.0  # seconds that one may take


async def until_ready(host: str, port: int) -> int:
    """The version that the server answers with, 0 for none."""
    backoff = Backoff(FIRST_LOOK, LONGEST_LOOK, factor=1.2)
    while (version := await asyncio.to_thread(_version_at, _reached_at(host), port)) is None:
        await asyncio.sleep(backoff.next())
    return version


def _version_at(host: str, port: int) -> int | None:
    connection = HTTPConnection(host, port, timeout=ANSWER)  # and not urllib, which might ask a proxy
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return int(json.loads(answer.read())["version"] or 0) if answer.status == 200 else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def _reached_at(host: str) -> str:
    """Everywhere is where one can listen, not where one can go."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def address(host: str, port: int) -> str:
    host = _reached_at(host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def welcome(serving: ServiceSettings, working: WorkerSettings, version: int) -> str:
    server = address(serving.host, serving.port)
    key = "-H 'Authorization: Bearer <key>' " if serving.keys else ""
    metrics = f"{server}/metrics"
    if working.metrics_port:
        metrics += f", and of the trainer {address(working.metrics_host, working.metrics_port)}/metrics"
    rows = {
        "console": server,
        "API": f"{server}/docs",
        "try it": f"curl {key}--data-binary @photo.jpg {server}/predict",
        "serving": _learned(serving, version) or f"nothing yet, so everything is novel; teach it: {_teach(server)}",
        "data": str(serving.data),
        "metrics": metrics,
        "stop": "Ctrl-C; started again with the same data folder, it goes on where it was",
    }
    width = max(map(len, rows))
    return "\n".join(["", "openworld is up", "", *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])


def _learned(serving: ServiceSettings, version: int) -> str:
    if not version:
        return ""
    with suppress(StoreError, OSError):
        classes = len(VersionStore(serving.data).manifest(version).classes)
        return f"version {version}, which knows {classes} class{'es' if classes != 1 else ''}"
    return f"version {version}"


def _teach(server: str) -> str:
    # As the reader's shell finds it: right after `make run` nothing is on the path yet.
    found = shutil.which("openworld") or not sys.argv[0].endswith("openworld")
    program = "openworld" if found else sys.argv[0]
    return f"{program} teach FOLDER" + (f" --url {server}" if server != remote.URL else "")
