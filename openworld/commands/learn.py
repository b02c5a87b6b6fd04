"""`openworld learn`: a folder of named images becomes the next version."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from models.errors import OpenWorldError
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from openworld import tables
from openworld.options import settings_from
from openworld.progress import Display
from tasks.batch import open_batch
from trainer.learning.settings import LearnerSettings

SUMMARY = "learn a folder of named images as the next task"
EPILOG = """\
examples:
  openworld learn animals/                       animals/cat/1.jpg, animals/dog/2.jpg, ...: a sub-folder a class
  openworld learn animals.zip --data robot       the same folder, zipped
  openworld learn more-cats/                     a class that is known already: its knowledge is extended
  openworld learn animals/ --backbone deit_small_patch16_224 --weights deit.safetensors

Interrupted or killed, the same command goes on from the last finished epoch. A batch that was learned already is not
learned again. Exit code 3: the new version forgets too much, was rejected, and is kept beside the versions.
Settings without an option are environment variables: docs/settings.md.
"""
REJECTED = 3
EXTRA = ("torch", "torchvision", "timm", "onnx", "onnxscript")

# The settings that people change, by the option that changes them; the others have their environment variable.
OPTIONS = {
    "--backbone": "backbone",
    "--weights": "backbone_weights",
    "--adapted-blocks": "adapted_blocks",
    "--bottleneck": "bottleneck",
    "--epochs": "epochs",
    "--learning-rate": "learning_rate",
    "--batch": "batch_size",
    "--views": "views",
    "--memory": "replay_size",
    "--rule": "rule",
    "--accept": "accept",
    "--gate-accuracy": "gate_accuracy",
    "--gate-auc": "gate_auc",
    "--seed": "seed",
    "--device": "device",
    "--threads": "threads",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images", type=Path, metavar="FOLDER|ZIP", help="a folder with a sub-folder a class, or a zip of it"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    settings = parser.add_argument_group("settings")
    for option, name in OPTIONS.items():
        field = LearnerSettings.model_fields[name]
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        metavar = None if choices else {"backbone": "NAME", "backbone_weights": "FILE"}.get(name, "N")
        # No type: the value goes to the settings as it is, which say what they accept.
        settings.add_argument(option, dest=name, choices=choices, metavar=metavar, help=_help(field, name))


def _help(field: FieldInfo, name: str) -> str:
    told = field.default is not None and not field.is_required() and field.default_factory is None
    default = f"default {field.default}; " if told else ""
    text = f"{field.description or name.replace('_', ' ')} ({default}{LearnerSettings.variables()[name]})"
    return text.replace("%", "%%")


def run(arguments: argparse.Namespace) -> int:
    _require_extra()
    given = {name: getattr(arguments, name) for name in OPTIONS.values()}
    settings = settings_from(LearnerSettings, given, {name: option for option, name in OPTIONS.items()})
    store = VersionStore(arguments.data)
    parent = store.current_manifest()
    with (
        open_batch(arguments.images, parent.classes if parent else []) as batch,
        Display() as display,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", module=r"(torch|timm|onnx|onnxscript)(\.|$)")  # nobody here can act on them
        display.say(f"{tables.count(len(batch.images), 'image')} of {', '.join(batch.classes)}; loading PyTorch")
        # Here and not above: torch takes seconds to load, and nothing before this line needs it.
        from trainer.publish import learn_batch

        outcome = learn_batch(arguments.data, batch, settings, display)
    if arguments.json:
        print(json.dumps(_result(outcome.state, outcome.manifest, outcome.folder), ensure_ascii=False))
    elif outcome.state == "already learned":
        current = store.current()
        n = outcome.manifest.version
        elsewhere = "" if current == n else f" (version {current} is current: openworld versions --activate {n})"
        print(f"already learned as version {n}{elsewhere}: nothing to do")
    else:
        tables.print_report(outcome.manifest)
        if outcome.state == "published":
            print(f"version {outcome.manifest.version} is current")
    if outcome.state == "rejected" and outcome.verdict:
        current = store.current()
        print(f"rejected, version {current} stays current:", file=sys.stderr)
        print(*(f"  - {reason}" for reason in outcome.verdict.reasons), sep="\n", file=sys.stderr)
        print(f"what was learned is kept in {outcome.folder}", file=sys.stderr)
        return REJECTED
    return 0


def _require_extra() -> None:
    missing = [name for name in EXTRA if find_spec(name) is None]
    if missing:
        raise OpenWorldError(f"learning needs {', '.join(missing)}: pip install 'openworld[train]'")


def _result(state: str, manifest: Manifest, folder: Path) -> dict[str, Any]:
    document = manifest.model_dump(mode="json", exclude={"files", "schema_version"})
    return {"state": state, "folder": str(folder), **document, "version": manifest.version or None}
