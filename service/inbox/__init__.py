"""The novelty inbox: novel images that wait for a label."""

from service.inbox.records import (
    STATES,
    AddResult,
    DropReason,
    Group,
    InboxLimits,
    Novelty,
    NoveltyFilter,
    Sighting,
    StateChange,
)
from service.inbox.similarity import EmbeddingScale
from service.inbox.store import Inbox, InboxInUse
from service.inbox.thumbnails import Thumbnails
from service.inbox.writer import InboxWriter, NoveltySink
