"""What the servers of a data folder share through Redis, where OPENWORLD_SERVE_SHARED asks for it."""

from service.shared.inbox import Lease, SharedInbox
from service.shared.inbox_backup import inbox_seconds, novelty_rows, restore_inbox
from service.shared.inbox_owner import InboxOwner
from service.shared.inbox_sink import InboxSink
from service.shared.key_store import SharedKeyStore
from service.shared.redis_state import RedisState
from service.shared.sightings import pack_sighting, unpack_sighting
