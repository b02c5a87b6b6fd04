"""The command `openworld`: its parser, and the one place where an error becomes a message and an exit code.

    0  success       1  some files could not be read, or `check` found problems
    2  an error, with a message that says what to do
    3  the gate rejected the new version                130  interrupted

Commands import torch and ONNX Runtime only when they use them.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from models.errors import OpenWorldError
from openworld.commands import (
    add_data_argument,
    backup,
    check,
    convert,
    demo,
    keys,
    learn,
    migrate,
    predict,
    prune,
    refuse_data_argument,
    restore,
    serve,
    teach,
    train,
    up,
    versions,
)
from openworld.environment import check_environment
from tasks.errors import BatchError

COMMANDS = (
    up,
    serve,
    train,
    learn,
    teach,
    predict,
    versions,
    keys,
    check,
    prune,
    backup,
    restore,
    migrate,
    convert,
    demo,
)
CLIENTS = (teach, demo)  # of a running service; they read no data folder
FAILED, INTERRUPTED = 2, 130

EPILOG = """\
first steps:
  openworld learn animals/ --data robot    animals/cat/1.jpg, animals/dog/2.jpg, ...: one sub-folder per class
  openworld predict photo.jpg --data robot
  openworld versions --data robot

Settings are environment variables, listed in docs/settings.md; an option takes precedence over its variable.
An OPENWORLD_* variable that is not a setting stops the program.
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="openworld",
        description="Classify images into learned classes, detect novel ones, and learn new classes continually.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"openworld {version('openworld')}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for command in COMMANDS:
        name = command.__name__.rpartition(".")[2]
        sub = commands.add_parser(
            name,
            help=command.SUMMARY,
            description=f"{command.SUMMARY[0].upper()}{command.SUMMARY[1:]}.",
            epilog=command.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        (refuse_data_argument if command in CLIENTS else add_data_argument)(sub)
        sub.set_defaults(run=command.run)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    arguments.data_option = arguments.data is not None
    named = arguments.data or os.environ.get("OPENWORLD_DATA")
    # With an object store it is clear whose data is meant: a service on this machine is not asked instead.
    arguments.data_named = bool(named or os.environ.get("OPENWORLD_STORE"))
    arguments.data = Path(named or "data")
    try:
        check_environment(os.environ)
        if arguments.data.exists() and not arguments.data.is_dir():
            raise OpenWorldError(f"--data {arguments.data} is a file: give a folder, or the name of a new one")
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        again = "; the same command continues from the last finished epoch" if arguments.command == "learn" else ""
        print(f"\ninterrupted{again}", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe (`| head`) has ended. Python flushes stdout again at exit: discard that.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OpenWorldError, OSError) as error:
        print(message(error), file=sys.stderr)
        return FAILED


def message(error: OpenWorldError | OSError) -> str:
    """The error message of a command; each problem of a batch on its own line."""
    if isinstance(error, BatchError) and len(error.problems) > 1:
        lines = "\n".join(f"  - {problem}" for problem in error.problems)
        return f"error: {len(error.problems)} problems\n{lines}"
    if _disk_is_full(error):
        return f"error: the disk is full, nothing was published: free space and run the same command again\n({error})"
    return f"error: {error}"


def _disk_is_full(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False
