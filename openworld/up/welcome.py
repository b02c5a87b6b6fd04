"""Wait until the server answers, and the message that `openworld up` prints then."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from contextlib import suppress
from http.client import HTTPConnection, HTTPException

from models.backoff import Backoff
from models.errors import StoreError
from models.versions.store import VersionStore
from openworld import remote
from service.key_store import KeyStore
from service.settings import ServiceSettings
from trainer.worker.settings import WorkerSettings

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0  # seconds between two requests to a server that is not ready
REQUEST_SECONDS = 2.0


async def wait_until_ready(host: str, port: int) -> int:
    """Return the active version of the server, 0 for none, when it is ready."""
    backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE, factor=1.2)
    while (version := await asyncio.to_thread(_active_version, connectable_host(host), port)) is None:
        await asyncio.sleep(backoff.next())
    return version


def _active_version(host: str, port: int) -> int | None:
    connection = HTTPConnection(host, port, timeout=REQUEST_SECONDS)  # urllib might use a proxy
    try:
        connection.request("GET", "/readyz")
        answer = connection.getresponse()
        return int(json.loads(answer.read())["version"] or 0) if answer.status == 200 else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()


def connectable_host(host: str) -> str:
    """Map a wildcard bind address to loopback."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url(host: str, port: int) -> str:
    host = connectable_host(host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def welcome(server: ServiceSettings, worker: WorkerSettings, version: int) -> str:
    url = _url(server.host, server.port)
    needs_keys = server.keys or "keys" in server.shared or KeyStore(server.data).records()
    key = "-H 'Authorization: Bearer <key>' " if needs_keys else ""
    metrics = f"{url}/metrics"
    if worker.metrics_port:
        metrics += f"; trainer: {_url(worker.metrics_host, worker.metrics_port)}/metrics"
    rows = {
        "console": url,
        "API": f"{url}/docs",
        "try it": f"curl {key}--data-binary @photo.jpg {url}/predict",
        "version": _learned(server, version) or f"none: every image is novel. Teach it: {_teach_command(url)}",
        "data": f"{server.store}, {server.data}" if server.store else str(server.data),
        "metrics": metrics,
        "stop": "Ctrl-C; the next start with the same data folder continues from here",
    }
    width = max(map(len, rows))
    return "\n".join(["", "openworld is up", "", *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])


def _learned(server: ServiceSettings, version: int) -> str:
    if not version:
        return ""
    with suppress(StoreError, OSError):
        classes = len(VersionStore(server.open_storage(test=False)).manifest(version).classes)
        return f"{version}, with {classes} class{'es' if classes != 1 else ''}"
    return str(version)


def _teach_command(url: str) -> str:
    # After `make run` the command is not on the PATH: show the path it was called by.
    on_path = shutil.which("openworld") or not sys.argv[0].endswith("openworld")
    program = "openworld" if on_path else sys.argv[0]
    return f"{program} teach FOLDER" + (f" --url {url}" if url != remote.URL else "")
