"""The novelty inbox: what the service answered `novel` to, kept until people have looked at it."""

from service.inbox.records import STATES, InboxLimits, Kept, Novelty, Page, Sighting, State
from service.inbox.store import Inbox
from service.inbox.writer import DropReason, InboxWriter

__all__ = [
    "STATES",
    "DropReason",
    "Inbox",
    "InboxLimits",
    "InboxWriter",
    "Kept",
    "Novelty",
    "Page",
    "Sighting",
    "State",
]
