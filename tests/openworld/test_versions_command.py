"""`openworld versions` of a data folder and of a running service."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.versions.store import VersionStore
from openworld import remote
from tests.support.coloured_images import tree
from tests.support.servers import RunningServer, learned_folder, running_server

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("environment")

Run = Any


@pytest.fixture
def two_versions(data: Path) -> Path:
    """A copy of `first` with a second version of the same tensors and fewer samples."""
    store = VersionStore(data)
    one = store.load(1)
    manifest = one.manifest.model_copy(update={"parent": 1, "task_id": "second"})
    samples = one.samples | {"held_out": one.samples["held_out"][1:]}
    assert store.publish(manifest, one.tensors, samples).version == 2
    return data


def test_a_version_of_a_folder_is_activated(two_versions: Path, batches: SimpleNamespace, run: Run) -> None:
    code, out, _ = run("versions", "--data", two_versions, "--activate", "1")
    assert code == 0
    assert re.search(r"current │ +1 │", out)
    store = VersionStore(two_versions)
    assert store.current() == 1
    assert [(line.version, line.by) for line in store.log()] == [(1, "trainer"), (2, "trainer"), (1, "operator")]
    assert json.loads(run("versions", "--data", two_versions, "--activate", "2", "--json")[1])["current"] == 2
    assert store.current() == 2
    code, out, _ = run("learn", batches.first, "--data", two_versions)
    assert code == 0
    assert "already learned as version 1 (version 2 is current: openworld versions --activate 1)" in " ".join(
        out.split()
    )


@pytest.mark.parametrize("number", ["9", "0", "-1"])
def test_activating_a_missing_version_changes_nothing(
    two_versions: Path, tmp_path: Path, run: Run, number: str
) -> None:
    before = tree(two_versions)
    code, out, err = run("versions", "--data", two_versions, f"--activate={number}")
    assert (code, out) == (2, "")
    assert f"there is no version {number}" in err
    assert tree(two_versions) == before
    assert run("versions", "--data", tmp_path / "nothing", "--activate", "1")[0] == 2
    assert not (tmp_path / "nothing").exists()


def test_a_damaged_version_is_not_activated_and_a_damaged_CURRENT_is_repaired(two_versions: Path, run: Run) -> None:
    VersionStore(two_versions).content_path(2, "samples").write_text("{}")
    (two_versions / "CURRENT").write_text("?")
    code, _, err = run("versions", "--data", two_versions, "--activate", "2")
    assert code == 2
    assert "samples" in err
    code, _, err = run("versions", "--data", two_versions)
    assert code == 2
    assert "openworld versions --activate N" in err
    assert run("versions", "--data", two_versions, "--activate", "1")[0] == 0
    assert VersionStore(two_versions).current() == 1


# Of a service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server without keys on a data folder with three versions, 3 current."""
    with running_server(learned_folder(tmp_path_factory.mktemp("service") / "robot"), threads=1) as running:
        yield running


def served(server: RunningServer) -> Path:
    return server.log.parent / "robot"


def test_versions_of_a_named_service_are_listed(server: RunningServer, run: Run, tmp_path: Path) -> None:
    code, out, err = run("versions", "--url", server.url, "--data", tmp_path / "ignored")
    assert (code, err) == (0, "")
    assert f"service at {server.url}" in out
    assert re.search(r"active │ +3 │ +2 │.*class 4 ", out)
    assert not re.search(r"(active|current) │ +[12] │", out)


def test_a_service_and_its_data_folder_give_the_same_document(server: RunningServer, run: Run) -> None:
    of_service = json.loads(run("versions", "--url", server.url, "--json")[1])
    of_folder = json.loads(run("versions", "--data", served(server), "--json")[1])
    assert of_service.pop("source") == server.url
    assert of_folder.pop("source") == str(served(server))
    assert (of_service.pop("active"), of_folder.pop("active")) == (3, None)
    assert of_service.pop("problem") is None
    for document in (of_service, of_folder):
        for version in document["versions"]:
            version["created"] = datetime.fromisoformat(version["created"]).replace(microsecond=0)
    assert of_service == of_folder


def test_the_service_of_the_environment_is_asked(
    server: RunningServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_URL", server.url)
    assert f"service at {server.url}" in run("versions")[1]


def test_the_option_for_a_folder_takes_precedence_over_the_service_of_the_environment(
    server: RunningServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENWORLD_URL", server.url)
    data = learned_folder(tmp_path / "robot")
    assert run("versions", "--data", data, "--activate", "1")[0] == 0
    assert (VersionStore(data).current(), VersionStore(served(server)).current()) == (1, 3)


def test_a_service_at_the_default_address_is_asked_unless_a_folder_is_named(
    server: RunningServer, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "URL", server.url)
    assert f"service at {server.url}" in run("versions")[1]
    assert "nothing is learned in elsewhere yet" in run("versions", "--data", "elsewhere")[1]
    monkeypatch.setenv("OPENWORLD_DATA", "elsewhere")
    assert "nothing is learned in elsewhere yet" in run("versions")[1]


def test_without_a_service_the_default_folder_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learned_folder(tmp_path / "data")
    with socket.socket() as unused:  # bound and not listening: a connection is refused
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(remote, "URL", f"http://127.0.0.1:{unused.getsockname()[1]}")
        code, out, _ = run("versions")
        assert code == 0
        assert "data folder /" in out
        code, _, err = run("versions", "--url", remote.URL)
    assert code == 2
    assert f"no service at {remote.URL}" in err


def test_a_program_at_the_default_address_that_does_not_answer_is_an_error_soon(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(remote, "URL", f"http://127.0.0.1:{silent.getsockname()[1]}")
        code, out, err = run("versions")
    assert (code, out) == (2, "")
    assert "no answer within 5 s" in err


@pytest.mark.parametrize(("status", "expected"), [(200, 0), (404, 0), (502, 2)])
def test_another_program_at_the_default_address_is_ignored_unless_a_version_is_activated(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *_: object) -> None: ...

    monkeypatch.chdir(tmp_path)
    learned_folder(tmp_path / "data")
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever).start()
        monkeypatch.setattr(remote, "URL", f"http://127.0.0.1:{other.server_port}")
        code, out, err = run("versions")
        activated = run("versions", "--activate", "1")
        other.shutdown()
    assert code == expected
    assert ("502 unknown" in err) if expected else ("data folder /" in out)
    assert activated[0] == 2
    assert "or a folder with --data" in activated[2]
    assert VersionStore(tmp_path / "data").current() == 3


def test_a_version_of_a_service_is_activated(server: RunningServer, run: Run) -> None:
    code, out, _ = run("versions", "--url", server.url, "--activate", "1")
    assert code == 0
    assert re.search(r"active │ +1 │", out)
    assert server.get("/versions").json()["serving"] == 1
    assert VersionStore(served(server)).log()[-1].reason == "anonymous: openworld versions --activate"
    code, _, err = run("versions", "--url", server.url, "--activate", "9")
    assert code == 2
    assert "there is no version 9" in err
    assert run("versions", "--url", server.url, "--activate", "3")[0] == 0
    assert server.get("/versions").json()["serving"] == 3


def test_a_damaged_version_of_a_service_is_named(run: Run, tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    VersionStore(data).content_path(3, "heads").write_bytes(b"damaged")
    with running_server(data, threads=1) as server:
        code, out, _ = run("versions", "--url", server.url)
        document = json.loads(run("versions", "--url", server.url, "--json")[1])
    assert code == 0
    assert re.search(r"current │ +3 │.*damaged: ", out)
    assert "version 3 is current, but cannot be loaded: " in out
    assert document["problem"] == document["versions"][2]["damaged"]


def test_a_service_with_nothing_learned_says_how_to_start(run: Run, tmp_path: Path) -> None:
    with running_server(tmp_path / "new", threads=1) as server:
        code, out, _ = run("versions", "--url", server.url)
    assert code == 0
    assert out == f"nothing is learned in the service at {server.url} yet. Start with: openworld teach FOLDER\n"


def test_a_service_with_keys_answers_the_key_of_the_environment(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = "a-secret-of-an-operator"
    with running_server(learned_folder(tmp_path / "robot"), threads=1, keys=f"ann:operate:{secret}") as server:
        code, _, err = run("versions", "--url", server.url)
        assert code == 2
        assert "unauthorized" in err
        monkeypatch.setenv("OPENWORLD_KEY", secret)
        assert run("versions", "--url", server.url, "--activate", "2")[0] == 0
        assert server.get("/readyz").json()["version"] == 2


def test_a_service_at_the_default_address_that_refuses_the_key_is_an_error(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    learned_folder(tmp_path / "data")
    keys = "ann:operate:a-secret-of-an-operator,bob:predict:a-secret-of-a-robot"
    with running_server(learned_folder(tmp_path / "robot"), threads=1, keys=keys) as server:
        monkeypatch.setattr(remote, "URL", server.url)
        for command in (["versions"], ["versions", "--activate", "1"], ["predict", "photo.jpg"]):
            code, out, err = run(*command)
            assert (code, out) == (2, "")
            assert "401 unauthorized" in err
        monkeypatch.setenv("OPENWORLD_KEY", "a-secret-of-a-robot")
        code, _, err = run("versions", "--activate", "1")
        assert code == 2
        assert "403 forbidden" in err
    assert VersionStore(tmp_path / "data").current() == VersionStore(tmp_path / "robot").current() == 3
