"""Convert a data folder to a mode that keeps less of its images (models/versions/keep.py).

**Killed at any moment, the folder can be used, and converted again.** The order gives that: the features of all images
that versions name are stored first, or it is checked that later tasks need none, then the mode is recorded, and what it
does not keep is discarded last. From the record on, a trainer discards as well what this call leaves of images.

**A folder that keeps statistics has no contents of earlier versions**: their sums may differ by single images. The
converted version is published before they are removed. Features say more than such sums, so that a folder that keeps
features keeps its versions.
"""

import logging
from collections.abc import Callable, Collection
from datetime import UTC, datetime
from typing import NamedTuple

from models.errors import CorruptVersion, KeepError
from models.files import remove_abandoned
from models.storage import DataFolder, storage_of
from models.versions.backbone_spec import BackboneSpec
from models.versions.class_ids import samples_by_name
from models.versions.contents import BASE
from models.versions.keep import Keep, check_less, record_less, recorded_keep
from models.versions.manifest import Manifest
from models.versions.pruning import discard_sums, discarded_versions, marked_versions
from models.versions.store import VersionStore
from tasks.batch import LEAST_SUMMED
from tasks.images import FeatureStore, ImageStore, cache_files, discard_images
from trainer.context import LearningContext, backbone_of, check_backbone
from trainer.data_folder import check_method, training_lock
from trainer.learning.draws import check_drawable
from trainer.learning.memory import Samples
from trainer.learning.reproducibility import configure_torch
from trainer.learning.settings import LearnerSettings

log = logging.getLogger(__name__)

CHUNK = 1000  # images that are discarded at a time


class Converted(NamedTuple):
    """What became of the images of a data folder."""

    features: int  # images whose features are kept
    discarded: frozenset[str]  # by this call
    unfinished: int  # images that tasks of the queue still need
    versions: tuple[int, ...] = ()  # that cannot become current any more
    contents: int = 0  # of these versions and of rejected results, removed by this call


def convert(
    folder: DataFolder,
    keep: Keep,
    settings: LearnerSettings,
    unfinished: Collection[str] = (),
    on_images: Callable[[int], None] = lambda count: None,
) -> Converted:
    """Convert the folder, in which no other program runs. `unfinished`: the images of tasks that have not ended.

    KeepError if the mode keeps more than the present one. `on_images` gets the number of images that are done.
    """
    storage = storage_of(folder)
    check_less(storage, keep)
    check_method(keep, storage, settings)
    store = VersionStore(storage)
    with training_lock(storage):
        if keep == "features" and recorded_keep(storage) == "images":
            _store_features(store, settings, on_images)
        if keep == "statistics":
            _check_statistics(store)
        record_less(storage, keep)
        _publish(store, keep)
        contents = len(discard_sums(store).contents)
        remove_abandoned(storage.root / "images")
        stored = {image.sha256 for image in ImageStore(storage)}
        features = {found.sha256 for found in FeatureStore(storage)}  # of all versions
        kept = features if keep == "features" else set[str]()
        cached = {file.sha256 for file in cache_files(storage.root)}
        discarded = sorted((stored | (features | cached) - kept) - set(unfinished))
        for start in range(0, len(discarded), CHUNK):
            discard_images(store, discarded[start : start + CHUNK], f"conversion to {keep}", kept)
            on_images(len(discarded[start : start + CHUNK]))
    left = len(stored & set(unfinished))
    return Converted(len(kept), frozenset(discarded), left, tuple(discarded_versions(store)), contents)


def _store_features(store: VersionStore, settings: LearnerSettings, on_images: Callable[[int], None]) -> None:
    """Those of all images that versions name: a version that is rolled back to can be learned on."""
    current = store.current_manifest()
    if current is None:
        return
    configure_torch(settings)
    backbone = backbone_of(store, settings, current)
    check_backbone("features", backbone)
    context = LearningContext.open(store, settings, backbone, current)
    features = FeatureStore(store.storage)
    for version in reversed(store.versions()):
        try:
            samples = Samples.from_json(store.samples(version)).without_missing(context.kept)
        except CorruptVersion as error:
            if version == current.version:  # its images would be lost
                raise
            log.warning("version %d cannot be learned on after the conversion: %s", version, error)
            continue
        context.store_features(samples, features)
        on_images(len(samples.keys))


def _check_statistics(store: VersionStore) -> None:
    """KeepError if later tasks could not draw from the statistics of the present ones, or if these reveal an image.

    Also if an operator has marked earlier versions to be kept.
    """
    current = store.current_manifest()
    if current is None:
        return
    check_drawable(BackboneSpec.from_dict(current.backbone))
    if BASE in current.files:
        raise KeepError(
            "the data folder was migrated from an older format, whose sums cannot be divided among its tasks: keep "
            "features, or teach the classes again in a new data folder"
        )
    if marked := {n for n in marked_versions(store) if store.manifest(n).keep != "statistics"}:
        raise KeepError(
            f"the conversion removes the contents of all earlier versions, and versions are marked to be kept: release "
            f"them first with `openworld versions --release N` ({', '.join(map(str, sorted(marked)))})"
        )
    samples = Samples.from_json(samples_by_name(store.samples(current.version, current), current))
    changes = [samples.seen, *samples.pending.values()]
    if few := [name for images in changes for name, keys in images.items() if len(keys) < LEAST_SUMMED]:
        raise KeepError(
            f"{len(few)} classes have fewer than {LEAST_SUMMED} images ({', '.join(few[:3])}), and sums over so few "
            "reveal the features of each: teach more images of these classes first, or keep features"
        )


def _publish(store: VersionStore, keep: Keep) -> None:
    """A version that differs from the current one by what it says about the folder; none if it says so already."""
    current: Manifest | None = store.current_manifest()
    if current is None or current.keep == keep:
        return
    changes = {
        "parent": current.version,
        "submission": None,
        "task_id": f"convert-{datetime.now(UTC):%Y%m%d%H%M%S}-{keep}",
        "keep": keep,
        "metrics": {**current.metrics, "advice": None, "images": 0, "images_per_class": {}, "edit": f"keeps {keep}"},
        "created": datetime.now(UTC),
        "version": 0,
    }
    store.publish_edit(current.model_copy(update=changes), "operator", f"the folder keeps {keep} from now on")
