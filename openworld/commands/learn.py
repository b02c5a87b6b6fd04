"""`openworld learn`: learn a folder of labelled images as the next version."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from openworld import tables
from openworld.commands import open_data, require_packages
from openworld.environment import settings_from
from openworld.progress import Display
from service.wire.advice import Advice
from tasks.batch import open_batch
from trainer.learning.settings import LearnerSettings

SUMMARY = "learn a folder of labelled images as the next task"
EPILOG = """\
examples:
  openworld learn animals/                       animals/cat/1.jpg, animals/dog/2.jpg, ...: one sub-folder per class
  openworld learn animals.zip --data robot       the same folder, zipped
  openworld learn more-cats/                     more images of a known class
  openworld learn animals/ --backbone deit_small_patch16_224 --weights deit.safetensors

After an interruption or a kill, the same command continues from the last finished epoch. A learned batch is not learned
again. Exit code 3: the gate rejected the new version, because it forgets too much; it is kept in the folder `rejected`.
"""
REJECTED = 3
REQUIRED_PACKAGES = ("torch", "torchvision", "timm", "onnx", "onnxscript")

SHORT_OPTIONS = {"backbone_weights": "--weights", "batch_size": "--batch", "replay_size": "--memory"}
# Field of LearnerSettings -> its option.
OPTIONS = {name: SHORT_OPTIONS.get(name, f"--{name.replace('_', '-')}") for name in LearnerSettings.variables()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "images", type=Path, metavar="FOLDER|ZIP", help="a folder with one sub-folder per class, or a zip of it"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    settings = parser.add_argument_group("settings")
    for name, option in OPTIONS.items():
        field = LearnerSettings.model_fields[name]
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else None
        metavar = None if choices else {"backbone": "NAME", "backbone_weights": "FILE"}.get(name, "N")
        # No type: LearnerSettings validates the value.
        settings.add_argument(option, dest=name, choices=choices, metavar=metavar, help=_help(field, name))


def _help(field: FieldInfo, name: str) -> str:
    default = "" if field.default is None or field.default_factory else f"default {field.default}; "
    return f"{field.description} ({default}{LearnerSettings.variables()[name]})".replace("%", "%%")


def run(arguments: argparse.Namespace) -> int:
    require_packages("train", *REQUIRED_PACKAGES)
    settings = settings_from(LearnerSettings, {name: getattr(arguments, name) for name in OPTIONS}, OPTIONS)
    storage = open_data(arguments)
    store = VersionStore(storage)
    parent = store.current_manifest()
    with (
        open_batch(arguments.images, parent.classes if parent else []) as batch,
        Display() as display,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", module=r"(torch|timm|onnx|onnxscript)(\.|$)")  # users cannot act on them
        display.say(f"{tables.count(len(batch.images), 'image')} of {', '.join(batch.classes)}; loading PyTorch")
        # Imported here: torch takes seconds to load.
        from trainer.publish import learn_batch

        outcome = learn_batch(storage, batch, settings, display)
        origins = {image.sha256: image.origin for image in batch.images}
    if arguments.json:
        print(json.dumps(_result(outcome.state, outcome.manifest, outcome.place), ensure_ascii=False))
    elif outcome.state == "already learned":
        current, n = store.current(), outcome.manifest.version
        hint = "" if current == n else f" (version {current} is current: openworld versions --activate {n})"
        print(f"already learned as version {n}{hint}: nothing to do")
    else:
        tables.print_report(outcome.manifest)
        tables.print_advice(Advice.model_validate(outcome.manifest.metrics["advice"] or {}), origins)
        if outcome.state == "published":
            print(f"version {outcome.manifest.version} is current")
    if outcome.state in ("rejected", "provisional") and outcome.verdict:  # pending since it was submitted before
        print(f"rejected, version {store.current()} stays current:", file=sys.stderr)
        print(*(f"  - {reason}" for reason in outcome.verdict.reasons), sep="\n", file=sys.stderr)
        print(f"the rejected version is kept in {outcome.place}", file=sys.stderr)
        return REJECTED
    return 0


def _result(state: str, manifest: Manifest, place: str) -> dict[str, Any]:
    document = manifest.model_dump(mode="json", exclude={"files", "schema_version"})
    return {"state": state, "manifest": place, **document, "version": manifest.version or None}
