"""What a data folder keeps of the images that it is taught: recorded in `KEEP`, checked whenever it is opened.

    images       the images that later tasks may need
    features     what the frozen trunk computes from these images; the images are discarded when their task ends
    statistics   nothing per image but its hash: sums over the images of a class

A folder without the record keeps images. `openworld convert` moves a folder to a mode that keeps less, never back.
"""

from __future__ import annotations

from typing import Literal, get_args

from models.errors import KeepError
from models.storage import DataFolder, Storage, storage_of
from models.versions.data_format import open_data_folder
from models.versions.manifest import Manifest

Keep = Literal["images", "features", "statistics"]
MODES: tuple[Keep, ...] = get_args(Keep)  # each keeps less than the one before it
RECORD, SETTING = "KEEP", "OPENWORLD_TRAIN_KEEP"


def recorded_keep(folder: DataFolder) -> Keep:
    """The mode of a data folder; KeepError if its record is damaged."""
    storage = storage_of(folder)
    try:
        text = storage.get(RECORD).decode("ascii", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        return "images"
    for mode in MODES:
        if text == mode:
            return mode
    raise KeepError(
        f"{storage.location(RECORD)} holds {text[:40]!r}, not one of {', '.join(MODES)}: restore it from a backup, or "
        "upgrade openworld"
    )


def check_keep(folder: DataFolder, requested: Keep | None) -> Keep:
    """The mode that `open_keep` would return; KeepError in the same cases. Nothing is written."""
    storage = storage_of(folder)
    found = recorded_keep(storage)
    if requested is None or requested == found:
        return found
    if storage.find(RECORD) is not None or storage.find("CURRENT") is not None:
        raise _mismatch(storage, found, requested)
    return requested


def open_keep(folder: DataFolder, requested: Keep | None) -> Keep:
    """The mode of a data folder. A folder without versions records the requested one, if one is requested.

    KeepError if the folder has another mode than the requested one. Call it before anything is learned.
    """
    storage = storage_of(folder)
    keep = check_keep(storage, requested)
    if keep == recorded_keep(storage):
        return keep
    open_data_folder(storage)
    storage.put_if_absent(RECORD, f"{keep}\n".encode())
    return check_keep(storage, requested)  # another program may have been faster


def check_less(folder: DataFolder, keep: Keep) -> None:
    """KeepError if the mode keeps more than the present one of the folder."""
    storage = storage_of(folder)
    found = recorded_keep(storage)
    if MODES.index(keep) < MODES.index(found):
        raise KeepError(
            f"the data folder {storage.location('')} keeps {found}, and what it does not keep cannot be recovered: to "
            f"keep {keep}, teach the classes again in a new data folder"
        )


def record_less(folder: DataFolder, keep: Keep) -> None:
    """Change the mode of a data folder to one that keeps less; KeepError for one that keeps more."""
    check_less(folder, keep)
    storage = storage_of(folder)
    if keep != recorded_keep(storage):
        storage.put(RECORD, f"{keep}\n".encode())


def why_discarded(keep: Keep, manifest: Manifest, current: int | None) -> str | None:
    """Why a folder with this mode has discarded the contents of a version; None: it has them.

    Two sums that differ by one image reveal its feature. A discarded version stays listed, and cannot become current
    again; `models.versions.pruning.discard_sums` removes its contents.
    """
    if keep != "statistics" or manifest.version == current:
        return None
    if manifest.keep != "statistics":
        return "it is from before the conversion of the data folder to statistics"
    if manifest.pending:
        return "it was provisional, and a folder that keeps statistics has only the sums of learned tasks"
    return None


def _mismatch(storage: Storage, found: Keep, requested: Keep) -> KeepError:
    remedy = "or use a new data folder"
    if MODES.index(requested) > MODES.index(found):
        remedy = f"or run `openworld convert --keep {requested}`, which discards what is kept beyond that"
    return KeepError(
        f"the data folder {storage.location('')} keeps {found}, but {SETTING} is {requested}: unset {SETTING}, {remedy}"
    )
