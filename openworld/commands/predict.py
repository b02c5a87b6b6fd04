"""`openworld predict`: name images, or say that they are novel."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.text import Text

from models.errors import ImageError, NothingLearned, OpenWorldError
from models.inference.answer import Answer
from models.versions.store import VersionStore
from openworld import remote, tables
from openworld.commands.versions import current_or_start
from openworld.progress import counting

if TYPE_CHECKING:
    from models.inference.predictor import Predictor

SUMMARY = "name images, or say that they are novel"
EPILOG = """\
examples:
  openworld predict photo.jpg --data robot
  openworld predict inbox/ --json | jq -r 'select(.novel) | .file'    every image of a folder; the novel ones
  openworld predict photo.jpg --version 3                             an earlier version
  openworld predict photo.jpg --url http://robot:8000                 ask a service; the key is in OPENWORLD_KEY

Who answers: the service that --url or OPENWORLD_URL names; else the data folder that --data or OPENWORLD_DATA names;
else a service on this machine, when one is running; else the folder ./data.
The score is the image's place among held-out images of known classes, 0 to 1: the same scale in every version.
Exit code 1: at least one file could not be read; the others have their answer.
"""
IMAGES = {".jpg", ".jpeg", ".png", ".webp"}
AT_ONCE = 64  # files held in memory
SOME_FAILED = 1


class Answers(Protocol):
    """Who predicts: a data folder or a service."""

    @property
    def version(self) -> int: ...

    def predict(self, images: Sequence[bytes]) -> list[Answer | ImageError]: ...


Result = tuple[Path, Answer | str]  # a file with its answer, or with why there is none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JPEG, PNG or WebP; a folder: all images in it"
    )
    parser.add_argument("--version", type=int, metavar="N", help="a version's number (default: the current one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a file, a line each")
    remote.add_arguments(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")


def run(arguments: argparse.Namespace) -> int:
    if remote.is_named(arguments):
        with remote.client(arguments) as client:
            return _predict(arguments, remote.RemotePredictor(client, arguments.version))
    if not arguments.data_named:
        with suppress(OpenWorldError), remote.client(arguments, timeout=1.0) as client:
            client.versions()
            arguments.url = remote.URL  # somebody is there: from here on, what goes wrong is said
    return run(arguments) if arguments.url else _predict(arguments, _local(arguments))


def _local(arguments: argparse.Namespace) -> Predictor:
    store = VersionStore(arguments.data)
    version = current_or_start(store) if arguments.version is None else arguments.version
    if version not in (there := store.versions()):
        raise NothingLearned(
            f"there is no version {version} in {store.root}, only {', '.join(map(str, there)) or 'none'}"
        )
    # Here and not above: ONNX Runtime need not load for a mistyped command.
    from models.inference.predictor import Predictor

    return Predictor.open(arguments.data, version, arguments.device)


def _predict(arguments: argparse.Namespace, predictor: Answers) -> int:
    version = predictor.version
    failed = 0
    rows: list[Sequence[str | Text]] = []
    with counting("images") as done:
        for path, answer in _answers(predictor, arguments.files):
            failed += isinstance(answer, str)
            done(1)
            if arguments.json:
                print(json.dumps(_document(path, answer, version)))
            else:
                rows.append(_row(path, answer))
    if not arguments.json:
        columns = ["file", "answer", "score ", "p(novel) ", "looks like"]
        where = f" of {arguments.url}" if arguments.url else ""
        tables.console().print(tables.table(columns, rows, title=f"version {version}{where}"))
    return SOME_FAILED if failed else 0


def _answers(predictor: Answers, given: Sequence[Path]) -> Iterator[Result]:
    """In the order given, a bounded number of files at a time."""
    waiting: list[tuple[Path, bytes | str]] = []
    for item in _files(given):
        waiting.append(item)
        if len(waiting) == AT_ONCE:
            yield from _answer(predictor, waiting)
            waiting = []
    yield from _answer(predictor, waiting)


def _answer(predictor: Answers, items: Sequence[tuple[Path, bytes | str]]) -> Iterator[Result]:
    answers = iter(predictor.predict([data for _, data in items if isinstance(data, bytes)]))
    for path, data in items:
        answer = data if isinstance(data, str) else next(answers)
        yield path, answer if isinstance(answer, Answer) else str(answer)


def _files(given: Sequence[Path]) -> Iterator[tuple[Path, bytes | str]]:
    """Each file with its bytes, or with why they cannot be had."""
    for path in given:
        try:
            if not path.is_dir():
                yield path, path.read_bytes()
                continue
            inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in IMAGES and not p.name.startswith("."))
            if not inside:
                yield path, "no JPEG, PNG or WebP in this folder"
        except OSError as error:
            yield path, error.strerror or str(error)
            continue
        yield from _files([p for p in inside if not p.is_dir()])


def _document(path: Path, answer: Answer | str, version: int) -> dict[str, Any]:
    found = {"error": answer} if isinstance(answer, str) else answer.to_dict()
    return {"file": os.fspath(path), "version": version, **found}


def _row(path: Path, answer: Answer | str) -> list[str | Text]:
    # A name that is not UTF-8 can be opened, but not printed.
    name = os.fsencode(path).decode(errors="replace")
    if isinstance(answer, str):
        return [name, Text(f"error: {answer}", style="red"), "", "", ""]
    label = Text(answer.label) if answer.label is not None else Text("novel", style="yellow")
    nearest = ", ".join(f"{name} {tables.percent(share)}" for name, share in answer.nearest)
    return [name, label, f"{answer.calibrated_score:.2f}", f"{answer.p_novel:.2f}", nearest]
