"""The novelty inbox: what the service answered `novel` to, kept until people have looked at it."""

from service.inbox.records import (
    STATES,
    Group,
    GroupPage,
    InboxLimits,
    Kept,
    Moved,
    Novelty,
    Only,
    Page,
    Sighting,
)
from service.inbox.store import Inbox
from service.inbox.writer import DropReason, InboxWriter

__all__ = [
    "STATES",
    "DropReason",
    "Group",
    "GroupPage",
    "Inbox",
    "InboxLimits",
    "InboxWriter",
    "Kept",
    "Moved",
    "Novelty",
    "Only",
    "Page",
    "Sighting",
]
