"""What learning in a data folder needs: the backbone, its graphs, the images and their features."""

from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from models.errors import CorruptVersion, KeepError, StaleParent
from models.inference.model import Model
from models.inference.runtime import Runtime
from models.network.backbone import Backbone, ResolvedBackbone, open_backbone, resolve_backbone
from models.network.export import export, roles
from models.versions.backbone_spec import recorded_backbone
from models.versions.class_ids import new_class_id
from models.versions.keep import Keep, recorded_keep
from models.versions.manifest import Manifest
from models.versions.pruning import discard_sums
from models.versions.store import VersionStore
from tasks.batch import LabelledBatch
from tasks.images import (
    FeatureCache,
    FeatureStore,
    ImageStore,
    KeptFeatures,
    KeptImages,
    discard_images,
    erased_images,
)
from trainer.data_folder import keep_of
from trainer.learning.draws import check_drawable
from trainer.learning.memory import Samples
from trainer.learning.methods import method_of
from trainer.learning.reproducibility import limit_threads, select_device
from trainer.learning.settings import LearnerSettings
from trainer.learning.tokens import TokenCache
from trainer.parent import Parent, Submission, with_method

# Not recorded among the settings: of one machine only, or a field of the manifest.
UNRECORDED_SETTINGS = {"backbone_weights", "device", "cache_bytes", "processes", "keep"}

STORED_AT_A_TIME = 500  # images; then the features of images that were erased in the meantime are removed

Choice = tuple[str | None, Path | None, int | None]  # name, weights, adapted blocks

# What `prepare_backbone` made, until the first task uses it: backbones, and graphs by the sha256 of their backbone.
_resolved: dict[Choice, ResolvedBackbone] = {}
_exported: dict[str, dict[str, bytes]] = {}


class _Tokens(NamedTuple):
    """What the tokens that are kept for the next task depend on."""

    root: Path
    backbone: str
    seed: int
    device: str
    cache_bytes: int
    graphs: tuple[tuple[str, str], ...]


_last_tokens: dict[_Tokens, TokenCache] = {}  # one at most


@dataclass(frozen=True)
class LearningContext:
    """Opened once per training."""

    store: VersionStore
    settings: LearnerSettings
    backbone: Backbone
    graphs: dict[str, str]
    images: ImageStore
    keep: Keep
    features: FeatureStore | None  # None: the folder keeps images, or statistics
    at_hand: Container[str]  # the images that are read from the batch
    kept: Container[str]  # the images that were not erased, or whose features were not
    device: str
    tokens: TokenCache

    @classmethod
    def open(
        cls,
        store: VersionStore,
        settings: LearnerSettings,
        backbone: Backbone,
        parent: Manifest | None,
        batch: LabelledBatch | None = None,
    ) -> Self:
        """`batch`: its images are read from it where the image store does not have them."""
        # Every version of a folder shares the graphs. Exported before the training, so that an error shows at once.
        graphs = parent.graphs if parent else {}
        prepared = _exported.pop(backbone.spec.sha256, None)
        if set(roles(backbone)) - graphs.keys():  # none yet, or those of an older release
            graphs = {role: store.add_graph(data) for role, data in (prepared or export(backbone)).items()}
        images, device = ImageStore(store.storage), select_device(settings)
        keep = keep_of(store.storage, settings)
        features = FeatureStore(store.storage) if keep == "features" else None
        check_backbone(keep, backbone)
        at_hand = {image.sha256 for image in batch.images} if batch else frozenset[str]()
        kept: Container[str] = KeptImages(store.storage) if store.storage.shared else images
        if keep != "images":
            kept = KeptFeatures(store.storage, at_hand)
        runtime = None
        if device == "cpu":  # ONNX Runtime computes what needs no gradient, with the graphs that servers load
            runtime = runtime_of(store, graphs, settings)
        made = _Tokens(
            store.root, backbone.spec.sha256, settings.seed, device, settings.cache_bytes, tuple(graphs.items())
        )
        tokens = _last_tokens.get(made) if keep == "images" else None
        if tokens is None:

            def read(sha256: str) -> bytes:
                return batch.read(sha256) if batch and sha256 in at_hand else images.read(sha256)

            stored = None  # features of an image are then in memory only
            if keep != "statistics":
                stored = FeatureCache(store.root, backbone.spec.sha256, kept, settings.cache_bytes)
            tokens = TokenCache(
                backbone, read, settings.seed, device, stored=stored, runtime=runtime, features=features
            )
            _last_tokens.clear()
            # The next task needs nearly the same images. Those of a transformer would take hundreds of megabytes.
            if backbone.one_token and not store.storage.shared and keep == "images":
                _last_tokens[made] = tokens
        chosen = with_method(settings, parent).model_copy(update={"keep": keep})
        return cls(store, chosen, backbone, graphs, images, keep, features, at_hand, kept, device, tokens)

    def store_features(self, samples: Samples, features: FeatureStore | None = None) -> None:
        """Store the features of the images of a version that is about to be published, if the folder keeps features.

        The method says which views later tasks need. `features`: where to store them in a folder that keeps images
        until it is converted.
        """
        target = features or self.features
        if target is None:
            return
        held_out, method = {sample.key for sample in samples.held_out}, method_of(self.settings)
        new = sorted(samples.keys - {found.sha256 for found in target})
        for start in range(0, len(new), STORED_AT_A_TIME):
            # Features that are not stored although there is no image were erased since they were read.
            keys = self._with_bytes(new[start : start + STORED_AT_A_TIME])
            target.put_all(
                (key, self.tokens.views(key, method.kept_views(self.settings, key in held_out))) for key in sorted(keys)
            )
            if lost := keys - self._with_bytes(keys):  # to an erasure, or to another trainer that has learned the task
                target.erase(lost & erased_images(self.store.storage, with_features=True))

    def check_keep(self) -> None:
        """StaleParent if the folder was converted since: a version must have what the folder keeps. Before publishing.

        A conversion excludes trainings on its own machine only.
        """
        if (keep := recorded_keep(self.store.storage)) != self.keep:
            raise StaleParent(f"the data folder was converted during the training, and keeps {keep} now")

    def _with_bytes(self, keys: Collection[str]) -> set[str]:
        """The images that the image store or the batch has."""
        at_hand = {key for key in keys if key in self.at_hand}
        return at_hand | self.images.find_all([key for key in keys if key not in at_hand]).keys()

    def discard(self, images: Mapping[str, Iterable[str]]) -> None:
        """Remove what is kept of images, by class, as far as neither their bytes nor stored versions need it.

        Call it after the version without them was published: sums that contain them may go as well.
        """
        discard_sums(self.store)
        if self.keep != "images":
            keys = {key for own in images.values() for key in own}
            discard_images(self.store, keys - self.images.find_all(keys).keys(), "end of a task")

    def present(self) -> Container[str]:
        """The images that are not erased now."""
        return self.kept if self.store.storage.shared or self.keep != "images" else self.images.keys()

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
            settings=self.settings.model_dump(mode="json", exclude=UNRECORDED_SETTINGS),
            keep=self.keep,
            data_sha256=submission.batch.sha256,
            **fields,
        )


def check_backbone(keep: Keep, backbone: Backbone) -> None:
    """KeepError if images could be computed from kept features, or features could not be drawn from statistics."""
    if keep == "statistics":
        check_drawable(backbone.spec)
    if keep == "features" and backbone.reveals_images:
        blocks = backbone.spec.adapted_blocks
        raise KeepError(
            f"all {blocks} blocks of {backbone.spec.name} are adapted, so images can be computed from what its trunk "
            f"gives: to keep features, set OPENWORLD_TRAIN_ADAPTED_BLOCKS={max(1, blocks // 2)}, in a new data folder"
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


def runtime_of(store: VersionStore, graphs: Mapping[str, str], settings: LearnerSettings) -> Runtime:
    """The graphs of the folder, loaded on a CPU."""
    paths = {role: store.graph_path(sha256) for role, sha256 in graphs.items()}
    # On all cores: it computes for a second per task, and the priority of this process is low.
    threads = None if settings.processes == 1 else settings.threads
    runtime = _runtime(threads, *sorted(paths.items()))
    limit_threads(settings)  # a runtime limits BLAS to one thread, as a server needs it
    return runtime


@lru_cache(maxsize=1)
def _runtime(threads: int | None, *graphs: tuple[str, Path]) -> Runtime:
    return Runtime(dict(graphs), "cpu", threads)


def _known_aliases(current: Manifest | None, model: Model) -> dict[str, str | None]:
    """The merged and retired classes of the current version that the model has as well."""
    aliases: Mapping[str, str | None] = current.aliases if current else {}
    known = set(model.classes)
    return {name: to for name, to in aliases.items() if name in known and (to is None or to in known)}
