"""Commands that talk to a running service: where it is, and with which key."""

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
AT_ONCE = 16  # images a request: a share of what a service takes, so that others have theirs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help=f"the service ({environment.URL}, else {URL})")


def is_named(arguments: argparse.Namespace) -> bool:
    """Somebody said which service."""
    return bool(arguments.url or os.environ.get(environment.URL))


@contextmanager
def client(arguments: argparse.Namespace, timeout: float = 30.0) -> Iterator[Client]:
    """The key comes from the environment alone: a command line can be read by everybody on the machine."""
    try:
        # Here and not above: the server and the trainer need no client.
        from service.client import Client, ClientError
    except ModuleNotFoundError as error:
        raise OpenWorldError(f"{error.name} is not installed: pip install 'openworld[client]'") from error
    url = arguments.url or os.environ.get(environment.URL) or URL
    if not url.startswith(("http://", "https://")):
        raise OpenWorldError(f"{url!r} is not an address of a service: write {URL}")
    _knock(url)
    try:
        with Client(url, os.environ.get(environment.KEY) or None, timeout) as opened:
            yield opened
    except ClientError as error:
        raise OpenWorldError(str(error)) from error


def _knock(url: str) -> None:
    """Nobody there is told at once: the client would wait, as it should for a robot."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname or "", port), timeout=5).close()
    except (OSError, ValueError) as error:
        raise OpenWorldError(f"no service at {url} ({error}): start one with `make run` or `openworld up`") from error


class RemotePredictor:
    """A service, with the face of `models.predictor.Predictor`."""

    def __init__(self, client: Client, version: int | None) -> None:
        self._client, self._pinned = client, version
        self.version = version if version is not None else client.versions().serving

    def predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]:
        from service.client import ApiError, Prediction

        out: list[Answer | ImageError] = []
        for start in range(0, len(images), AT_ONCE):
            part = images[start : start + AT_ONCE]
            try:
                found = self._client.predict_many(part, version=self._pinned)
            except ApiError as error:
                if error.code not in ("unsupported_image", "broken_image", "image_too_large"):
                    raise
                if len(part) == 1:
                    out.append(ImageError(error.detail))
                else:  # not one of them could be read; alone, each has a reason of its own
                    for image in part:
                        out += self.predict([image])
                continue
            out += [_answer(one) if isinstance(one, Prediction) else ImageError(one.error.detail) for one in found]
        return out


def _answer(prediction: Prediction) -> Answer:
    fields = prediction.model_dump(exclude={"id", "version", "nearest"})
    return Answer(**fields, nearest=[(one.label, one.share) for one in prediction.nearest])
