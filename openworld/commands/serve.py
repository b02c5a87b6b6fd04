"""`openworld serve`: serve a data folder over HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from models.errors import OpenWorldError
from openworld import address, logs
from openworld.environment import settings_from
from service.settings import ServiceSettings

SUMMARY = "serve the data folder over HTTP: POST /predict, /versions, /metrics"
EPILOG = """\
examples:
  openworld serve --data robot
  curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict
  OPENWORLD_KEYS=robot-1:predict:$(openssl rand -hex 24) openworld serve --data robot --host 0.0.0.0

A data folder without a version can be served: every image is novel. A new current version replaces the active one
without a pause. Without keys the server accepts connections from this machine only.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    address.add_arguments(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: OPENWORLD_DEVICE, else auto")


def run(arguments: argparse.Namespace) -> int:
    try:
        # Imported here: other commands need no web server.
        from service.main import serve
    except ModuleNotFoundError as error:
        raise OpenWorldError(f"not installed: {error.name}. Install it: pip install 'openworld[serve]'") from error
    given: dict[str, Any] = {name: getattr(arguments, name) for name in ("data", "host", "port", "device")}
    settings = settings_from(ServiceSettings, given)
    logs.set_up(settings.log_level, settings.log_format)
    # Before the model is loaded, so that a port in use is reported at once.
    with address.bind(settings.host, settings.port) as listener:
        return serve(settings, listener)
