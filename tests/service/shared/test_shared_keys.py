"""Keys that servers share through Redis: changes reach all of them, and an outage of Redis changes nothing."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from models.errors import OpenWorldError
from models.versions.folder_id import folder_id
from openworld.cli import main
from service.audit import AuditLog
from service.http.auth import Keyring
from service.key_store import SHARED_COPY
from service.keys import parse_keys
from service.settings import ServiceSettings
from service.shared import RedisState, SharedKeyStore
from tasks.errors import QueueUnavailable
from tasks.queue import key_prefix
from tests.support.redis_servers import PREFIX, RedisServer


@pytest.fixture
def store(redis_state: RedisState, tmp_path: Path) -> SharedKeyStore:
    """Of the command `openworld keys`, on another machine than the servers."""
    return SharedKeyStore(tmp_path / "command", redis_state)


def keyring_of(data: Path, state: RedisState) -> Keyring:
    data.mkdir(exist_ok=True)
    return Keyring((), SharedKeyStore(data, state))


def test_created_and_revoked_keys_reach_all_servers(
    store: SharedKeyStore, redis_state: RedisState, tmp_path: Path
) -> None:
    servers = [keyring_of(tmp_path / name, redis_state) for name in ("a", "b")]
    assert all(server.find(None) is None for server in servers), "a server with shared keys is never open"
    secret = store.create("robot", {"predict"})
    for server in servers:
        server.reload()
        found = server.find(secret)
        assert found is not None
        assert (found.name, found.roles) == ("robot", {"predict"})
        assert server.find(secret + "x") is None
    store.revoke("robot")
    for server in servers:
        server.reload()
        assert server.find(secret) is None
    with pytest.raises(OpenWorldError, match="there is or was a key 'robot'"):
        store.create("robot", {"operate"})
    with pytest.raises(OpenWorldError, match="there is no key 'unknown' in Redis"):
        store.revoke("unknown")


def test_redis_and_the_copies_hold_no_secret(store: SharedKeyStore, redis_state: RedisState, tmp_path: Path) -> None:
    secret = store.create("robot", {"predict"})
    keyring_of(tmp_path / "a", redis_state)
    copy = (tmp_path / "a" / SHARED_COPY).read_text()
    for key in redis_state.client.scan_iter():
        if redis_state.client.type(key) == b"string":
            assert secret.encode() not in (redis_state.client.get(key) or b"")
    assert "robot" in copy
    assert secret not in copy


def test_no_change_of_another_process_is_lost(
    store: SharedKeyStore, redis_state: RedisState, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, get, changed = SharedKeyStore(tmp_path / "other", redis_state), redis_state.get, False

    def get_and_change(key: str) -> bytes | None:
        nonlocal changed
        found = get(key)
        if not changed:
            changed = True
            other.create("other", {"label"})  # between the read and the write of the first one
        return found

    monkeypatch.setattr(redis_state, "get", get_and_change)
    store.create("robot", {"predict"})
    assert [record.name for record in store.records()] == ["other", "robot"]


def test_the_last_known_keys_work_while_redis_is_away_also_after_a_restart(
    store: SharedKeyStore, redis_state: RedisState, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = store.create("robot", {"predict"})
    keyring_of(tmp_path / "a", redis_state)
    with closing(RedisState(f"unix://{tmp_path}/absent.sock", PREFIX)) as absent:
        restarted = keyring_of(tmp_path / "a", absent)
        restarted.reload()
        assert restarted.find(secret) is not None
        assert caplog.text.count("Redis does not answer") == 1
        with pytest.raises(
            OpenWorldError, match="Redis does not answer, and the shared keys may not have been changed"
        ):
            SharedKeyStore(tmp_path / "a", absent).revoke("robot")
        # A server that has never read the keys accepts those of its settings, and nothing else.
        fresh = Keyring(parse_keys("anna:operate:0123456789abcdef"), SharedKeyStore(tmp_path, absent))
        assert fresh.find(secret) is None
        assert fresh.find(None) is None
        assert fresh.find("0123456789abcdef") is not None


def test_a_change_that_no_replica_confirms_is_reported_and_audited_as_made(
    redis_server: RedisServer,
    redis_state: RedisState,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(self: RedisState, replicas: int, seconds: float) -> int:
        raise QueueUnavailable("connection refused")

    data = tmp_path / "command"
    id = folder_id(data)
    for name, value in (("REDIS_URL", redis_server.url), ("REDIS_REPLICAS", "1"), ("SERVE_SHARED", "keys")):
        monkeypatch.setenv(f"OPENWORLD_{name}", value)
    monkeypatch.setattr(RedisState, "confirmed", fail)
    assert main(["keys", "create", "robot", "--roles", "predict", "--data", str(data)]) == 2
    shown = capsys.readouterr()
    assert "the keys were changed, but none of 1 replicas of Redis have confirmed it" in shown.err
    assert shown.out.startswith("ow_")  # the key may be valid: its secret is not shown again
    assert main(["keys", "revoke", "robot", "--data", str(data)]) == 2
    assert [entry.action for entry in AuditLog(data).page(10).items] == ["key.revoke", "key.create"]
    with closing(RedisState(redis_server.url, key_prefix(id))) as state:
        assert [record.state(datetime.now(UTC)) for record in SharedKeyStore(data, state).records()] == ["revoked"]


def test_a_server_with_shared_keys_may_listen_on_all_addresses(tmp_path: Path) -> None:
    shared = ("keys",)
    settings = ServiceSettings(data=tmp_path, host="0.0.0.0", shared=shared, redis_url="redis://127.0.0.1:1")
    assert settings.shared == shared
    with pytest.raises(ValueError, match="needs Redis"):
        ServiceSettings(data=tmp_path, shared=shared)
