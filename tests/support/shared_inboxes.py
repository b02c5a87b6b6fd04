"""What a server has of the shared inbox, without HTTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from models.files import sha256_bytes
from models.images import DEFAULT_LIMITS
from service.inbox import AddResult, InboxLimits
from service.shared import InboxOwner, InboxSink, Lease, RedisState, SharedInbox
from tasks.images import ImageStore
from tests.support.inbox import sighting
from tests.support.novelties import block_image

SECONDS = 30.0  # of a lease: many tests have no thread that renews it
SHORT_SECONDS = 0.6  # the same, where it has to expire
FAR_APART = ([1.0, 0, 0, 0], [0, 1.0, 0, 0], [0, 0, 1.0, 0], [0, 0, 0, 1.0])


@dataclass
class Server:
    """What one server has of the shared inbox."""

    state: RedisState
    images: ImageStore
    name: str
    limits: InboxLimits = field(default_factory=InboxLimits)
    erased: set[str] = field(default_factory=set)
    erased_at: dict[str, float] = field(default_factory=dict)
    inbox: SharedInbox | None = None
    results: list[AddResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sink = InboxSink(self.state, self.images, self.limits, DEFAULT_LIMITS)
        self.owner = InboxOwner(self.state, self.name, self.open, self._use, self.results.append)

    def open(self, lease: Lease) -> SharedInbox:
        return SharedInbox(
            self.state,
            lease,
            self.images,
            self.limits,
            image_limits=DEFAULT_LIMITS,
            scale=lambda: None,
            is_erased=self.erased.__contains__,
            erased_at=lambda: self.erased_at,
        )

    def _use(self, inbox: SharedInbox | None) -> None:
        self.inbox = inbox

    def counts(self) -> dict[str, int]:
        """Novelty -> sightings."""
        assert self.inbox is not None
        states = ("new", "labelled", "dismissed")
        return {item.id: item.count for state in states for item in self.inbox.list(state, 200).items}

    def crash(self) -> None:
        """End as a killed process does: without a word to Redis."""
        self.owner._stopping.set()
        self.owner._thread.join()

    @property
    def lease_seconds(self) -> float:
        """Until the lease of the inbox expires, of this or another server; 0 if no server has it."""
        return max(0, self.state.client.pttl(self._lease_key)) / 1000

    def expire_lease(self) -> None:
        """As if the server that owns the inbox, this or another, had not renewed its lease for too long."""
        self.state.client.delete(self._lease_key)

    @property
    def _lease_key(self) -> str:
        return f"{self.state.prefix}:inbox-owner"


NewServer = Callable[..., Server]


def send(server: Server, number: int, embedding: int | None = None) -> str:
    """Hand a block image over, unlike those of other numbers; returns its id."""
    vector = None if embedding is None else FAR_APART[embedding]
    data = block_image(number)
    assert server.sink.add(sighting(data, number, vector)).outcome == "new"
    return sha256_bytes(data)
