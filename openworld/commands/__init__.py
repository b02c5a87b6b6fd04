"""One module per command. Each has SUMMARY, EPILOG, add_arguments and run."""

import argparse
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from models.errors import OpenWorldError


def require_packages(extra: str, *names: str) -> None:
    """Raise OpenWorldError with the extra to install, unless all packages are installed."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        raise OpenWorldError(f"not installed: {', '.join(missing)}. Install them: pip install 'openworld[{extra}]'")


def add_data_argument(parser: argparse.ArgumentParser, default: Any = None) -> None:
    """The option of every command that names the data folder."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        default=default,
        help="the data folder: versions, images, backbone, inbox (default: OPENWORLD_DATA, else ./data)",
    )
