"""The novelty inbox: novel images that wait for a label."""

from service.inbox.records import (
    STATES,
    AddResult,
    DropReason,
    Group,
    GroupPage,
    InboxLimits,
    Novelty,
    NoveltyFilter,
    NoveltyPage,
    Sighting,
    StateChange,
)
from service.inbox.store import Inbox
from service.inbox.thumbnails import Thumbnails
from service.inbox.writer import InboxWriter

__all__ = [
    "STATES",
    "AddResult",
    "DropReason",
    "Group",
    "GroupPage",
    "Inbox",
    "InboxLimits",
    "InboxWriter",
    "Novelty",
    "NoveltyFilter",
    "NoveltyPage",
    "Sighting",
    "StateChange",
    "Thumbnails",
]
