"""Valid manifests: one without files behind it, and one of a real model."""

from typing import Any

from models.inference.model import Model
from models.versions.backbone_spec import BackboneSpec
from models.versions.manifest import Manifest


def make_manifest(task_id: str = "task-1", parent: int | None = None, **changes: Any) -> Manifest:
    """A valid manifest with `changes` applied."""
    fields: dict[str, Any] = {
        "parent": parent,
        "task_id": task_id,
        "tasks": [["cat", "dög"]],
        "backbone": {"name": "tiny"},
        "backbone_sha256": "b" * 64,
        "preprocessing_sha256": "c" * 64,
        "graphs": {},
        "rule": {"name": "paper", "weights": {}, "scales": [], "shifts": []},
        "threshold": 0.25,
        "novel_above": 0.5,
        "metrics": {"accuracy": 0.9},
        "settings": {"epochs": 3},
        "data_sha256": "d" * 64,
    }
    fields |= changes
    return Manifest(**({"class_ids": fields["tasks"]} | fields))  # any unique text is an id


def manifest_of(model: Model, spec: BackboneSpec, **changes: Any) -> Manifest:
    """The manifest of a version that holds `model`."""
    own: dict[str, Any] = {
        "task_id": f"task-{len(model.tasks)}",
        "tasks": [list(task.classes) for task in model.tasks],
        "backbone": spec.to_dict(),
        "backbone_sha256": spec.sha256,
        "preprocessing_sha256": spec.preprocessing.sha256,
        "rule": model.rule.to_dict(),
        "threshold": float(model.novelty.threshold[0]),
        "novel_above": model.novelty.novel_above,
    }
    return make_manifest(**(own | changes))
