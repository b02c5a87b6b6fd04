"""`openworld serve`: answer POST /predict from a data folder."""

from __future__ import annotations

import argparse
from typing import Any

from models.errors import OpenWorldError
from openworld import logs
from openworld.options import settings_from

SUMMARY = "serve the data folder over HTTP: POST /predict, /versions, /metrics"
EPILOG = """\
examples:
  openworld serve --data robot
  curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' http://127.0.0.1:8000/predict
  OPENWORLD_KEYS=robot-1:predict:$(openssl rand -hex 24) openworld serve --data robot --host 0.0.0.0

A folder in which nothing is learned is served too: everything is novel. A version that is learned or activated
meanwhile is noticed, and swapped in without a pause. Without keys only this machine may connect.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", help="address to listen on (OPENWORLD_HOST, else 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (OPENWORLD_PORT, else 8000; 0: a free one)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help="OPENWORLD_DEVICE, else auto")


def run(arguments: argparse.Namespace) -> int:
    try:
        # Here and not above: the other commands need neither a web server nor its settings.
        from service import main as server
        from service.settings import ServiceSettings
    except ModuleNotFoundError as error:
        raise OpenWorldError(f"{error.name} is not installed: pip install 'openworld[serve]'") from error
    given: dict[str, Any] = {name: getattr(arguments, name) for name in ("data", "host", "port", "device")}
    settings = settings_from(ServiceSettings, given)
    logs.set_up(settings.log_level, settings.log_format)
    return server.serve(settings)
