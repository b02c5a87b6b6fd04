"""Connection of the command line to a running service."""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from models.errors import ImageError, OpenWorldError
from models.inference.answer import Answer
from openworld import environment

if TYPE_CHECKING:
    from service.client import Client, Prediction

URL = "http://127.0.0.1:8000"
REQUEST_IMAGES = 16  # per request, so that a command leaves room for other clients
CONNECT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help=f"the service (default: {environment.URL}, else {URL})")


class NotListening(OpenWorldError):
    """No connection can be made to the address of a service."""


def find_service(arguments: argparse.Namespace, *, read_only: bool = True) -> str | None:
    """The URL of the service to ask, None for the data folder.

    Options come before variables, a service before a folder: --url, --data, OPENWORLD_URL, OPENWORLD_DATA. Without all
    of them, a service at the default address. A service that refuses to answer, or is slow, is an error: the folder may
    belong to it. If another program listens there, the data folder is used, but only with `read_only`.
    """
    variable = None if arguments.data_option else os.environ.get(environment.URL)
    if named := arguments.url or variable:
        return str(named)
    if arguments.data_named:
        return None
    try:
        with connect(URL, CONNECT_SECONDS) as client:
            client.versions()
            return URL
    except NotListening:
        return None
    except OpenWorldError as error:
        answer = error.__cause__
        if read_only and getattr(answer, "code", None) == "unknown" and getattr(answer, "status", 500) < 500:
            return None  # not an answer of openworld, nor of a proxy that cannot reach it
        raise OpenWorldError(f"{URL}: {error}; name another service with --url, or a folder with --data") from error


def service_url(url: str | None) -> str:
    """The address that was given, or OPENWORLD_URL, or the default address."""
    return url or os.environ.get(environment.URL) or URL


@contextmanager
def connect(url: str | None, timeout: float = 30.0) -> Iterator[Client]:
    """A client of the service at `service_url(url)`.

    The key comes from the environment only: other users of the machine can read a command line.
    """
    url = service_url(url)
    if not url.startswith(("http://", "https://")):
        raise OpenWorldError(f"{url!r} is not the address of a service: write {URL}")
    _check_connection(url, min(timeout, CONNECT_SECONDS))
    try:
        # Imported here: the server and the trainer need no client.
        from service.client import Client, ClientError
    except ModuleNotFoundError as error:
        raise OpenWorldError(f"{error.name} is not installed: pip install 'openworld[client]'") from error
    try:
        with Client(url, os.environ.get(environment.KEY) or None, timeout) as client:
            yield client
    except ClientError as error:
        raise OpenWorldError(str(error)) from error


def _check_connection(url: str, timeout: float) -> None:
    """Raise NotListening if nothing listens at `url`. The client itself would retry until its timeout."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname or "", port), timeout).close()
    except TimeoutError as error:
        raise OpenWorldError(f"no connection to {url} within {timeout:g} s") from error
    except (OSError, ValueError) as error:
        raise NotListening(f"no service at {url} ({error}): start one with `make run` or `openworld up`") from error


class RemotePredictor:
    """A service with the interface of `models.inference.predictor.Predictor`."""

    def __init__(self, client: Client, version: int | None) -> None:
        self._client, self._pinned = client, version
        self.version = version if version is not None else client.versions().serving

    def predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]:
        from service.client import ApiError, Prediction

        out: list[Answer | ImageError] = []
        for start in range(0, len(images), REQUEST_IMAGES):
            part = images[start : start + REQUEST_IMAGES]
            try:
                found = self._client.predict_many(part, version=self._pinned)
            except ApiError as error:
                if error.code not in ("unsupported_image", "broken_image", "image_too_large"):
                    raise
                if len(part) == 1:
                    out.append(ImageError(error.detail))
                else:  # none of them can be read: ask for the reason of each
                    for image in part:
                        out += self.predict([image])
                continue
            out += [_answer(one) if isinstance(one, Prediction) else ImageError(one.error.detail) for one in found]
        return out


def _answer(prediction: Prediction) -> Answer:
    fields = prediction.model_dump(exclude={"id", "version", "nearest"})
    return Answer(**fields, nearest=[(one.label, one.share) for one in prediction.nearest])
