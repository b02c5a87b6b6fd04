"""`openworld keys`: create, list and revoke the API keys of a data folder."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from typing import cast

from models.errors import OpenWorldError
from openworld import tables
from openworld.commands import add_data_argument, require_packages
from openworld.environment import settings_from
from service.audit import AuditLog
from service.key_store import SHARED_COPY, KeyRecord, KeyStore, KeysUnconfirmed
from service.keys import NAME, ROLES
from service.settings import Shared
from service.wire.keys import Role
from tasks.settings import ProgramSettings
from tasks.settings import shared as shared_setting

SUMMARY = "create, list and revoke the API keys of a data folder"
EPILOG = """\
examples:
  openworld keys create robot-1 --roles predict
  openworld keys create anna --roles label+predict --days 90
  openworld keys list
  openworld keys revoke robot-1

Roles: predict (robots), label (labellers), operate (operators), monitor (the names of keys in /metrics). A running
server reads changes within seconds. Once a data folder has a key, its servers answer no request without one, also after
the last key is revoked. Keys in OPENWORLD_KEYS are valid as well and are not listed here.

With OPENWORLD_SERVE_SHARED=keys, as the servers have it, these are the keys that they share in OPENWORLD_REDIS_URL.
"""
MAX_DAYS = 36500.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    create = actions.add_parser("create", help="add a key and print its secret, which is not stored")
    create.add_argument("name", metavar="NAME", help="in logs, metrics and the audit log")
    create.add_argument("--roles", required=True, metavar="ROLE+ROLE", help=f"of {', '.join(sorted(ROLES))}")
    create.add_argument("--days", type=float, metavar="N", help="the key expires after this many days (default: never)")
    show = actions.add_parser("list", help="list all keys, without their secrets")
    show.add_argument("--json", action="store_true", help="print one JSON object")
    revoke = actions.add_parser("revoke", help="make a key invalid for ever")
    revoke.add_argument("name", metavar="NAME")
    for action, function in ((create, _create), (show, _list), (revoke, _revoke)):
        # Also after the action; absent there, the value before it stands.
        add_data_argument(action, default=argparse.SUPPRESS)
        action.set_defaults(run_action=function)


class _KeySettings(ProgramSettings):
    """What decides where the keys are."""

    shared: Shared = shared_setting("OPENWORLD_SERVE_SHARED", (), "what servers share")


def run(arguments: argparse.Namespace) -> int:
    settings = settings_from(_KeySettings, {"data": arguments.data})
    with _key_store(settings) as store:
        code: int = arguments.run_action(arguments, store)
    return code


@contextmanager
def _key_store(settings: _KeySettings) -> Iterator[KeyStore]:
    if "keys" not in settings.shared:
        yield KeyStore(settings.data)
        return
    if settings.redis_url is None:
        raise OpenWorldError("OPENWORLD_SERVE_SHARED has keys, which are in Redis: set OPENWORLD_REDIS_URL")
    require_packages("serve", "redis", "fastapi")
    # Imported here: keys in a file need neither Redis nor an object store.
    from models.versions.folder_id import folder_id
    from service.shared import RedisState, SharedKeyStore
    from tasks.queue import key_prefix

    prefix = key_prefix(folder_id(settings.open_storage(test=False)))
    with closing(RedisState(settings.redis_url.get_secret_value(), prefix)) as state:
        yield SharedKeyStore(settings.data, state, settings.confirming_replicas)


def _create(arguments: argparse.Namespace, store: KeyStore) -> int:
    name, roles, days = arguments.name, arguments.roles.split("+"), arguments.days
    if not NAME.fullmatch(name):
        raise OpenWorldError("a name has 1 to 64 letters, digits, _ . and -")
    if set(roles) - ROLES:
        raise OpenWorldError(f"unknown role: choose from {', '.join(sorted(ROLES))}, joined by +")
    if days is not None and not 0 < days <= MAX_DAYS:
        raise OpenWorldError(f"--days is more than 0 and at most {MAX_DAYS:g}")
    lifetime = None if days is None else timedelta(days=days)
    secret: str | None = None
    try:
        with _audited(arguments, "key.create", roles=sorted(set(roles)), days=days):
            secret = store.create(name, cast(set[Role], set(roles)), lifetime)
    except KeysUnconfirmed as error:
        secret = error.secret
        raise
    finally:
        if secret is not None:
            # To stderr, so that the secret alone can be read by a script.
            shown = ", ".join(sorted(set(roles)))
            print(f"key {name!r} with the roles {shown}; its secret is not shown again:", file=sys.stderr)
            print(secret)
    return 0


def _list(arguments: argparse.Namespace, store: KeyStore) -> int:
    records, now = store.records(), datetime.now(UTC)
    if arguments.json:
        keys = [
            {**record.model_dump(mode="json", exclude={"sha256"}), "state": record.state(now)} for record in records
        ]
        print(json.dumps({"keys": keys}, ensure_ascii=False))
    elif not records:
        print(f"there are no keys in {store.place}. Create one: openworld keys create NAME --roles predict")
    else:
        rows = [_row(record, now) for record in records]
        tables.console().print(tables.table(["name", "roles", "state", "created", "expires"], rows))
    return 0


def _row(record: KeyRecord, now: datetime) -> list[str]:
    expires = tables.date(record.expires.isoformat()) if record.expires else "never"
    return [
        record.name,
        ", ".join(record.roles),
        record.state(now),
        tables.date(record.created.isoformat()),
        "–" if record.revoked else expires,
    ]


def _revoke(arguments: argparse.Namespace, store: KeyStore) -> int:
    copy = arguments.data / SHARED_COPY
    if not store.shared and copy.exists():
        raise OpenWorldError(
            f"the servers of {arguments.data} share keys in Redis, where a key of this name would stay valid: set "
            "OPENWORLD_SERVE_SHARED and OPENWORLD_REDIS_URL as the servers have them; if they share keys no longer, "
            f"delete {copy}"
        )
    with _audited(arguments, "key.revoke"):
        store.revoke(arguments.name)
    print(f"key {arguments.name!r} is revoked")
    return 0


@contextmanager
def _audited(arguments: argparse.Namespace, action: str, **detail: object) -> Iterator[None]:
    """Log a change that was made, also one that a failure of Redis may undo."""
    try:
        yield
    except KeysUnconfirmed:
        AuditLog(arguments.data).record_command(action, arguments.name, **detail)
        raise
    AuditLog(arguments.data).record_command(action, arguments.name, **detail)
