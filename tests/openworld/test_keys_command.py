"""`openworld keys`: a running server accepts a created key and refuses a revoked or expired one, without a restart."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from models.errors import StoreError
from openworld.cli import main
from service.http.auth import Keyring
from service.key_store import SHARED_COPY, KeyStore
from service.keys import parse_keys
from service.settings import ServiceSettings
from tests.support.servers import RunningServer, running_server, wait_until
from tests.support.settings import clean_environment

Run = Any
SECRET = "a-secret-of-the-environment"


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENWORLD_DATA", "OPENWORLD_KEYS"):
        monkeypatch.delenv(name, raising=False)


def create(run: Run, data: Path, name: str, roles: str, *options: str) -> str:
    code, out, err = run("keys", "create", name, "--roles", roles, *options, "--data", data)
    assert code == 0, err
    assert name in err
    secret: str = out.strip()
    assert secret not in err
    return secret


def status(server: RunningServer, secret: str | None, path: str = "/versions") -> int:
    headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
    return httpx.get(f"{server.url}{path}", headers=headers, timeout=30).status_code


# A running server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Started without any key."""
    with running_server(tmp_path_factory.mktemp("keys") / "robot", threads=1, inbox=False) as running:
        yield running


def data_of(server: RunningServer) -> Path:
    return server.log.parent / "robot"


def test_changes_take_effect_without_a_restart(server: RunningServer, run: Run) -> None:
    data = data_of(server)
    assert status(server, None) == 200
    anna = create(run, data, "anna", "operate")
    wait_until(lambda: status(server, None) == 401)  # from the first key on, every request needs one
    assert status(server, anna) == 200
    assert server.get("/me", headers={"X-API-Key": anna}).json() == {
        "keys_needed": True,
        "name": "anna",
        "roles": ["operate"],
        "keep": "images",
    }
    robot = create(run, data, "robot", "predict")
    wait_until(lambda: status(server, robot) == 200)
    assert status(server, robot, "/audit") == 403
    assert run("keys", "revoke", "robot", "--data", data)[0] == 0
    wait_until(lambda: status(server, robot) == 401)
    assert status(server, anna) == 200

    entries = server.get("/audit", headers={"X-API-Key": anna}).json()["items"]
    assert [(entry["action"], entry["target"]) for entry in entries] == [
        ("key.revoke", "robot"),
        ("key.create", "robot"),
        ("key.create", "anna"),
    ]
    assert all(entry["by"].endswith(" on the command line") for entry in entries)

    # Without a valid key the server answers nobody, instead of everybody.
    assert run("keys", "revoke", "anna", "--data", data)[0] == 0
    wait_until(lambda: status(server, anna) == 401)
    assert status(server, None) == 401
    (data / "keys.json").unlink()
    bob = create(run, data, "bob", "operate")
    wait_until(lambda: status(server, bob) == 200)
    assert status(server, None) == 401


def test_no_secret_is_stored_or_logged(server: RunningServer, run: Run) -> None:
    secret = create(run, data_of(server), "carl", "predict")
    wait_until(lambda: status(server, secret) == 200)
    status(server, secret, "/audit")
    files = [path for path in data_of(server).rglob("*") if path.is_file()]
    assert files
    assert not [path for path in [*files, server.log] if secret.encode() in path.read_bytes()]
    assert secret not in run("keys", "list", "--data", data_of(server), "--json")[1]


def test_a_server_in_a_network_starts_with_keys_of_its_folder(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ValueError, match="openworld keys create"):
        ServiceSettings(data=tmp_path, host="0.0.0.0")
    create(run, tmp_path, "anna", "operate")
    assert ServiceSettings(data=tmp_path, host="0.0.0.0").host == "0.0.0.0"


# The keyring


def test_a_key_expires(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    now = datetime.now(UTC).timestamp()
    secret = store.create("anna", {"label"}, timedelta(days=2))
    clock = [now]
    ring = Keyring((), store, clock=lambda: clock[0])
    assert ring.find(secret) is not None
    clock[0] = now + 2 * 86400 - 10
    assert ring.find(secret) is not None
    clock[0] = now + 2 * 86400 + 10
    assert ring.find(secret) is None
    assert ring
    assert [record.state(datetime.now(UTC) + timedelta(days=3)) for record in store.records()] == ["expired"]


def test_a_damaged_file_changes_no_keys_of_a_running_server_and_stops_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = KeyStore(tmp_path)
    secret = store.create("anna", {"label"})
    ring = Keyring((), store)
    (tmp_path / "keys.json").write_text('{"keys": [{"name": "anna"}]}')
    ring.reload()
    assert ring.find(secret) is not None
    assert "keys.json" in caplog.text
    with pytest.raises(StoreError, match=r"keys\.json"):
        Keyring((), store)


def test_a_key_of_the_environment_keeps_its_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KeyStore(tmp_path)
    secret = store.create("anna", {"operate"})
    ring = Keyring(parse_keys(f"anna:predict:{SECRET}"), store)
    found = ring.find(SECRET)
    assert found is not None
    assert found.roles == {"predict"}
    assert ring.find(secret) is None
    assert "'anna'" in caplog.text


# The command


def test_keys_are_listed_with_their_states(tmp_path: Path, run: Run) -> None:
    assert "there are no keys" in run("keys", "list", "--data", tmp_path)[1]
    create(run, tmp_path, "robot-1", "predict")
    create(run, tmp_path, "anna", "label+predict", "--days", "30")
    run("keys", "revoke", "robot-1", "--data", tmp_path)
    code, out, _ = run("keys", "--data", tmp_path, "list", "--json")
    assert code == 0
    first, second = json.loads(out)["keys"]
    assert (first["name"], first["state"], second["state"]) == ("robot-1", "revoked", "valid")
    assert second["roles"] == ["label", "predict"]
    lifetime = datetime.fromisoformat(second["expires"]) - datetime.fromisoformat(second["created"])
    assert lifetime == timedelta(days=30)
    table = run("keys", "list", "--data", tmp_path)[1]
    assert all(word in table for word in ("robot-1", "revoked", "anna", "label, predict", "valid"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["create", "anna", "--roles", "fly"], "unknown role"),
        (["create", "a b", "--roles", "label"], "letters, digits"),
        (["create", "anna", "--roles", "label", "--days", "0"], "--days"),
        (["create", "anna", "--roles", "label", "--days", "nan"], "--days"),
        (["create", "taken", "--roles", "label"], "there is or was a key 'taken'"),
        (["revoke", "anna"], "there is no key 'anna'"),
    ],
)
def test_a_wrong_command_changes_nothing(tmp_path: Path, run: Run, arguments: list[str], message: str) -> None:
    create(run, tmp_path, "taken", "predict")
    before = (tmp_path / "keys.json").read_bytes()
    code, out, err = run("keys", *arguments, "--data", tmp_path)
    assert (code, out) == (2, "")
    assert message in err
    assert (tmp_path / "keys.json").read_bytes() == before


def test_the_name_of_a_revoked_key_is_not_used_again(tmp_path: Path, run: Run) -> None:
    create(run, tmp_path, "anna", "predict")
    run("keys", "revoke", "anna", "--data", tmp_path)
    assert main(["keys", "create", "anna", "--roles", "predict", "--data", str(tmp_path)]) == 2


def test_a_key_of_the_file_is_not_revoked_where_servers_share_keys(tmp_path: Path, run: Run) -> None:
    create(run, tmp_path, "anna", "predict")
    copy = tmp_path / SHARED_COPY
    copy.write_bytes(b"")
    code, _, err = run("keys", "revoke", "anna", "--data", tmp_path)
    assert code == 2
    assert "OPENWORLD_SERVE_SHARED" in err
    assert [record.revoked for record in KeyStore(tmp_path).records()] == [None]
    copy.unlink()
    assert run("keys", "revoke", "anna", "--data", tmp_path)[0] == 0


def test_commands_at_the_same_time_lose_no_key(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from service.key_store import KeyStore\n"
        "[KeyStore(Path(sys.argv[1])).create(f'{sys.argv[2]}-{n}', ['label']) for n in range(5)]"
    )
    commands = [[sys.executable, "-c", code, str(tmp_path), name] for name in ("a", "b", "c")]
    running = [subprocess.Popen(command, env=clean_environment()) for command in commands]
    assert [process.wait(60) for process in running] == [0, 0, 0]
    assert len(KeyStore(tmp_path).records()) == 15
