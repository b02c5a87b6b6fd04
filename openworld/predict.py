"""`openworld predict`: name images, or say that they are novel."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from models.answer import Answer
from models.errors import NothingLearned
from models.store import VersionStore
from openworld import tables
from openworld.versions import current_or_start

if TYPE_CHECKING:
    from models.predictor import Predictor

SUMMARY = "name images, or say that they are novel"
EPILOG = """\
examples:
  openworld predict photo.jpg --data robot
  openworld predict inbox/ --json | jq -r 'select(.novel) | .file'    every image of a folder; the novel ones
  openworld predict photo.jpg --version 3                             an earlier version

The score is the image's place among held-out images of known classes, 0 to 1: the same scale in every version.
Exit code 1: at least one file could not be read; the others have their answer.
"""
IMAGES = {".jpg", ".jpeg", ".png", ".webp"}
AT_ONCE = 64  # files held in memory
SOME_FAILED = 1

Result = tuple[Path, Answer | str]  # a file with its answer, or with why there is none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="JPEG, PNG or WebP; a folder: all images in it"
    )
    parser.add_argument("--version", type=int, metavar="N", help="a version's number (default: the current one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a file, a line each")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default auto")


def run(arguments: argparse.Namespace) -> int:
    store = VersionStore(arguments.data)
    version = current_or_start(store) if arguments.version is None else arguments.version
    if version not in (there := store.versions()):
        raise NothingLearned(
            f"there is no version {version} in {store.root}, only {', '.join(map(str, there)) or 'none'}"
        )
    # Here and not above: ONNX Runtime need not load for a mistyped command.
    from models.predictor import Predictor

    predictor = Predictor.open(arguments.data, version, arguments.device)
    failed = 0
    rows: list[Sequence[str | Text]] = []
    for path, answer in _answers(predictor, arguments.files):
        failed += isinstance(answer, str)
        if arguments.json:
            print(json.dumps(_document(path, answer, version)))
        else:
            rows.append(_row(path, answer))
    if not arguments.json:
        columns = ["file", "answer", "score ", "p(novel) ", "looks like"]
        tables.console().print(tables.table(columns, rows, title=f"version {version}"))
    return SOME_FAILED if failed else 0


def _answers(predictor: Predictor, given: Sequence[Path]) -> Iterator[Result]:
    """In the order given, a bounded number of files at a time."""
    waiting: list[tuple[Path, bytes | str]] = []
    for item in _files(given):
        waiting.append(item)
        if len(waiting) == AT_ONCE:
            yield from _answer(predictor, waiting)
            waiting = []
    yield from _answer(predictor, waiting)


def _answer(predictor: Predictor, items: Sequence[tuple[Path, bytes | str]]) -> Iterator[Result]:
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
