"""What learning in a data folder needs: the backbone, its graphs, the images and their features."""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from models.errors import CorruptVersion
from models.inference.model import Model
from models.inference.runtime import Runtime
from models.network.backbone import Backbone, ResolvedBackbone, open_backbone, resolve_backbone
from models.network.export import export, roles
from models.versions.backbone_spec import recorded_backbone
from models.versions.class_ids import new_class_id
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tasks.images import FeatureCache, ImageStore, KeptImages
from trainer.learning.reproducibility import limit_threads, select_device
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache
from trainer.parent import Parent, Submission

MACHINE_SETTINGS = {"backbone_weights", "device", "cache_bytes"}  # not recorded: of one machine only

Choice = tuple[str | None, Path | None, int | None]  # name, weights, adapted blocks

# What `prepare_backbone` made, until the first task uses it: backbones, and graphs by the sha256 of their backbone.
_resolved: dict[Choice, ResolvedBackbone] = {}
_exported: dict[str, dict[str, bytes]] = {}


@dataclass(frozen=True)
class LearningContext:
    """Opened once per training."""

    store: VersionStore
    settings: LearnerSettings
    backbone: Backbone
    graphs: dict[str, str]
    images: ImageStore
    kept: Container[str]  # the images that were not erased
    device: str
    tokens: TokenCache

    @classmethod
    def open(cls, store: VersionStore, settings: LearnerSettings, backbone: Backbone, parent: Manifest | None) -> Self:
        # Every version of a folder shares the graphs. Exported before the training, so that an error shows at once.
        graphs = parent.graphs if parent else {}
        prepared = _exported.pop(backbone.spec.sha256, None)
        if set(roles(backbone)) - graphs.keys():  # none yet, or those of an older release
            graphs = {role: store.add_graph(data) for role, data in (prepared or export(backbone)).items()}
        images, device = ImageStore(store.storage), select_device(settings)
        kept = KeptImages(store.storage) if store.storage.shared else images
        runtime = None
        if device == "cpu":  # ONNX Runtime computes what needs no gradient, with the graphs that servers load
            paths = {role: store.graph_path(sha256) for role, sha256 in graphs.items()}
            runtime = _runtime(*sorted(paths.items()))
            limit_threads(settings)  # a runtime limits BLAS to one thread, as a server needs it
        stored = FeatureCache(store.root, backbone.spec.sha256, kept, settings.cache_bytes)
        tokens = TokenCache(backbone, images.read, settings.seed, device, stored=stored, runtime=runtime)
        return cls(store, settings, backbone, graphs, images, kept, device, tokens)

    def manifest(self, parent: Parent, submission: Submission, model: Model, **fields: Any) -> Manifest:
        """The manifest of a version that follows the parent, with these fields; the store adds its files."""
        known = parent.manifest.id_of if parent.manifest else {}
        spec = self.backbone.spec

        def class_id(name: str) -> str:
            return known.get(name) or new_class_id(submission.task_id, name)

        return Manifest(
            parent=parent.version,
            task_id=submission.task_id,
            submission=submission.id,
            tasks=[list(names) for names in model.classes_by_task],
            class_ids=[[class_id(name) for name in names] for names in model.classes_by_task],
            aliases=_known_aliases(parent.manifest, model),
            backbone=spec.to_dict(),
            backbone_sha256=spec.sha256,
            preprocessing_sha256=spec.preprocessing.sha256,
            graphs=self.graphs,
            rule=model.rule.to_dict(),
            threshold=model.novelty.novel_below,
            novel_above=model.novelty.novel_above,
            settings=self.settings.model_dump(mode="json", exclude=MACHINE_SETTINGS),
            data_sha256=submission.batch.sha256,
            **fields,
        )


def prepare_backbone(store: VersionStore, settings: LearnerSettings) -> None:
    """Export the backbone of a folder without versions, which takes half a minute, before its first task waits for it.

    In memory only: until the first task, another backbone can be chosen.
    """
    if recorded_backbone(store.storage) is not None:
        backbone = backbone_of(store, settings, None)
    else:
        resolved = _resolved[_chosen(settings)] = resolve_backbone(*_chosen(settings))
        backbone = resolved.backbone
    _exported[backbone.spec.sha256] = export(backbone)


def _chosen(settings: LearnerSettings) -> Choice:
    return settings.backbone, settings.backbone_weights, settings.adapted_blocks


def backbone_of(store: VersionStore, settings: LearnerSettings, parent: Manifest | None) -> Backbone:
    """The backbone of a folder with this current version; CorruptVersion if that has another one."""
    chosen, recorded = _chosen(settings), recorded_backbone(store.storage)
    resolved = _resolved.pop(chosen, None)
    if recorded is not None:  # not before: until then it may change
        backbone = _opened(recorded.sha256, store.storage, *chosen)
    elif resolved is not None:
        backbone = resolved.record(store.storage)
    else:
        backbone = open_backbone(store.storage, *chosen)
    used = backbone.spec.sha256
    if parent is not None and parent.backbone_sha256 != used:
        made_with = f"version {parent.version}: made with the backbone {parent.backbone_sha256}"
        raise CorruptVersion(f"{made_with}, but {used} is in use", "backbone")
    return backbone


@lru_cache(maxsize=1)
def _opened(recorded: str, *chosen: Any) -> Backbone:
    """Kept for the next task: people wait for its provisional version."""
    return open_backbone(*chosen)


@lru_cache(maxsize=1)
def _runtime(*graphs: tuple[str, Path]) -> Runtime:
    """On all cores: it computes for a second per task, and the priority of this process is low."""
    return Runtime(dict(graphs), "cpu")


def _known_aliases(current: Manifest | None, model: Model) -> dict[str, str | None]:
    """The merged and retired classes of the current version that the model has as well."""
    aliases: Mapping[str, str | None] = current.aliases if current else {}
    known = set(model.classes)
    return {name: to for name, to in aliases.items() if name in known and (to is None or to in known)}
