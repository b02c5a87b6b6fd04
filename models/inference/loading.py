"""From a stored version to a model: what the bytes say, once they are known to be the right ones."""

from __future__ import annotations

from models.errors import CorruptVersion
from models.images import Preprocessing
from models.inference.model import Model
from models.inference.rules import Rule
from models.versions.backbone_spec import BackboneSpec
from models.versions.store import LoadedVersion


def read_model(loaded: LoadedVersion) -> tuple[Model, Preprocessing]:
    """What a version has learned and how it wants its pictures; its bytes were checked, but not what they say."""
    manifest = loaded.manifest
    try:
        model = Model.from_tensors(loaded.tensors, manifest.tasks, Rule.from_dict(manifest.rule), manifest.aliases)
        preprocessing = BackboneSpec.from_dict(manifest.backbone).preprocessing
        if preprocessing.sha256 != manifest.preprocessing_sha256:
            raise ValueError("the preprocessing is not the one that its hash names")
        return model, preprocessing
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptVersion(
            f"version {manifest.version}: not what this openworld writes ({error!r}); upgrade openworld"
        ) from error
