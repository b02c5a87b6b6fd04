"""One module per command. Each has SUMMARY, EPILOG, add_arguments and run."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.errors import OpenWorldError
from models.storage import Storage
from openworld.environment import settings_from
from tasks.settings import StorageSettings


def require_packages(extra: str, *names: str) -> None:
    """Raise OpenWorldError with the extra to install, unless all packages are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise OpenWorldError(f"not installed: {', '.join(missing)}. Install them: pip install 'openworld[{extra}]'")


def open_data(arguments: argparse.Namespace, *, read_only: bool = False) -> Storage:
    """The data folder of a command: that of --data, and the object store of OPENWORLD_STORE if it is set."""
    return settings_from(StorageSettings, {"data": arguments.data}).open_storage(test=not read_only)


def require_data(settings: StorageSettings) -> None:
    """OpenWorldError unless there is a data folder, or an object store that takes its place."""
    if not settings.store and not settings.data.is_dir():
        raise OpenWorldError(f"there is no data folder {settings.data}: name one with --data")


class _RefuseData(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.error(
            "--data does not say which service to use: give its address with --url, as `openworld up` has printed it; "
            "`openworld learn` teaches a folder without a service"
        )


def refuse_data_argument(parser: argparse.ArgumentParser) -> None:
    """For a command that uses a service only: a folder does not tell the address of its service."""
    parser.add_argument("--data", action=_RefuseData, help=argparse.SUPPRESS)


def add_data_argument(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """The option of every command that names the data folder."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=default,
        help="the data folder: versions, images, backbone, inbox (default: OPENWORLD_DATA, else ./data)",
    )
