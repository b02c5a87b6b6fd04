"""Make the rows and the images of an inbox agree again, when it is opened after a kill.

A kill leaves an image without a row, or a row without an image: see `store`.
"""

import logging
import re
from contextlib import suppress
from pathlib import Path

from models.errors import ImageError
from models.files import TEMPORARY, sha256_bytes
from models.images import ImageLimits
from service.inbox.index import NoveltyIndex
from service.inbox.records import Now, Sighting
from service.inbox.similarity import EmbeddingScale, inspect_image
from service.inbox.table import InboxTable

log = logging.getLogger(__name__)

_IMAGE_FILE = re.compile(rf"[0-9a-f]{{64}}|\..*{re.escape(TEMPORARY)}")


def recovered_index(
    table: InboxTable, folder: Path, room: int, scale: EmbeddingScale | None, limits: ImageLimits, now: Now
) -> NoveltyIndex:
    """Index the rows that have an image; delete rows without an image, add rows for images without one.

    `folder` is that of the inbox, and `room` the number of novelties that it may hold.
    """
    files = {path.name: path for path in folder.glob("images/*/*") if _IMAGE_FILE.fullmatch(path.name)}
    index = NoveltyIndex(max(room, sum(table.counts().values()), len(files)), scale)
    lost = []
    for entry in table.entries():
        if files.pop(entry.id, None) is None:
            lost.append(entry.id)
        else:
            index.add(entry)
    table.delete(lost)
    for path in sorted(files.values(), key=lambda path: path.stat().st_mtime):
        _adopt(table, index, path, limits, now)
    return index


def _adopt(table: InboxTable, index: NoveltyIndex, path: Path, limits: ImageLimits, now: Now) -> None:
    """Add the row of an image without one as a novelty with an unknown answer; remove an incomplete file."""
    data = path.read_bytes()
    if sha256_bytes(data) != path.name:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder has other images
            path.parent.rmdir()
        return
    try:
        info = inspect_image(data, limits)
    except ImageError as error:  # the limits may be lower than before
        log.warning("the image %s of the inbox has no row and cannot be shown: %s", path.name, error)
        return
    index.add(table.insert(path.name, Sighting.without_answer(data), now, info))
