"""The version store: killed, raced, damaged and out of space, it stays valid and says why it refuses."""

import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models.errors import CorruptVersion, NothingLearned, StaleParent, StoreError
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.paths import ROOT

STEPS = ["started", "written", "renamed", "logged", "promoted"]
TENSORS = {"head.0": np.arange(6, dtype=np.float32).reshape(2, 3), "mask": np.array([True, False])}
SAMPLES = {"memory": [["cat", "ab12"]]}

# What a trainer does with a task, as a program of its own: it can be killed at a step, or raced against its like.
TRAINER = """
import os, signal, sys
from pathlib import Path
import numpy as np
from models.errors import StaleParent
from models.versions.manifest import Manifest
from models.versions.store import VersionStore

root, manifest, die_at = Path(sys.argv[1]), Manifest.from_json(sys.argv[2].encode()), sys.argv[3]

def on_step(step):
    if step == die_at:
        os.kill(os.getpid(), signal.SIGKILL)

if die_at == "race":
    print("ready", flush=True)
    sys.stdin.readline()
try:
    print(VersionStore(root, on_step).publish(manifest, {"w": np.ones(3)}, {}).version)
except StaleParent:
    print("stale")
"""


def publish(store: VersionStore, task_id: str, parent: int | None, **changes: Any) -> int:
    return store.publish(make_manifest(task_id, parent, **changes), TENSORS, SAMPLES).version


def start_trainer(root: Path, manifest: Manifest, die_at: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRAINER, str(root), manifest.to_json().decode(), die_at]
    return subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def tree(root: Path) -> dict[str, bytes | None]:
    """Everything below, but for the lock; a folder is None."""
    paths = (p for p in root.rglob("*") if p.name != ".lock")
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in paths}


def temporaries(root: Path) -> list[Path]:
    return list(root.rglob("*.tmp"))


@pytest.fixture
def store(tmp_path: Path) -> VersionStore:
    return VersionStore(tmp_path / "data")


# Publishing and loading


def test_a_published_version_is_current_and_loads_as_it_was(store: VersionStore) -> None:
    graph = store.add_graph(b"a graph")
    published = store.publish(make_manifest(graphs={"trunk": graph}), TENSORS, SAMPLES)
    loaded = store.load()
    assert store.current() == published.version == 1
    assert loaded.manifest == published == store.manifest(1)
    assert loaded.samples == SAMPLES
    assert {k: v.tolist() for k, v in loaded.tensors.items()} == {k: v.tolist() for k, v in TENSORS.items()}
    assert sorted(p.name for p in (store.root / "versions/000001").iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "samples.json",
    ]
    assert not temporaries(store.root)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__" and name.isprintable()),
        hnp.arrays(
            st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.int32, np.int64, np.uint8, np.bool_]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        ),
        max_size=4,
    )
)
def test_tensors_of_any_type_and_shape_survive_even_as_views(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = VersionStore(Path(folder))
        views = {name: tensor.T for name, tensor in tensors.items()}
        store.publish(make_manifest(), views, None)
        loaded = store.load().tensors
    assert loaded.keys() == views.keys()
    for name, view in views.items():
        assert loaded[name].dtype == view.dtype
        np.testing.assert_array_equal(loaded[name], view, strict=True)


def test_a_tensor_that_cannot_be_kept_is_refused_before_anything_is_written(store: VersionStore) -> None:
    with pytest.raises(StoreError, match="tensors cannot be written"):
        store.publish(make_manifest(), {"t": np.array(["2024"], dtype="datetime64[s]")}, None)
    with pytest.raises(StoreError, match="samples cannot be written"):
        store.publish(make_manifest(), TENSORS, [float("nan")])
    assert not store.root.exists()


def test_an_empty_store_has_learned_nothing(store: VersionStore) -> None:
    assert store.current() is None
    assert store.versions() == []
    assert store.log() == []
    assert store.find_task("task-1") is None
    with pytest.raises(NothingLearned):
        store.load()
    assert not store.root.exists()


def test_a_version_is_readable_by_another_user(store: VersionStore) -> None:
    before = os.umask(0o022)
    try:
        publish(store, "task-1", None)
    finally:
        os.umask(before)
    assert (store.root / "versions/000001").stat().st_mode & 0o777 == 0o755
    assert (store.root / "CURRENT").stat().st_mode & 0o777 == 0o644


# Damage


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_manifest(folder: Path, /, **changes: Any) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def half_written(version: Path) -> None:
    (version / "manifest.json").unlink()
    (version / "samples.json").unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda v: flip_a_byte(v / "model.safetensors"), r"model\.safetensors does not match its sha256"),
        (lambda v: flip_a_byte(v / "samples.json"), r"samples\.json does not match its sha256"),
        (lambda v: (v / "model.safetensors").unlink(), r"model\.safetensors cannot be read: No such file"),
        (lambda v: os.truncate(v / "model.safetensors", 5), r"model\.safetensors has 5 bytes"),
        (lambda v: (v / "manifest.json").write_text("{"), r"manifest\.json: not JSON"),
        (half_written, r"manifest\.json cannot be read: No such file"),
        (lambda v: edit_manifest(v, schema_version=2), "upgrade openworld"),
        (lambda v: edit_manifest(v, version=7), "says it is version 7"),
        (lambda v: edit_manifest(v, files={}), r"manifest\.json lists \[\]"),
        (lambda v: flip_a_byte(next((v.parents[1] / "graphs").iterdir())), r"graph trunk .* does not match its sha256"),
        (lambda v: next((v.parents[1] / "graphs").iterdir()).unlink(), r"graph trunk .* cannot be read: No such file"),
    ],
)
def test_a_damaged_version_is_refused_with_the_reason(
    store: VersionStore, damage: Callable[[Path], None], reason: str
) -> None:
    publish(store, "task-1", None, graphs={"trunk": store.add_graph(b"a graph")})
    damage(store.root / "versions/000001")
    with pytest.raises(CorruptVersion, match=f"version 1: .*{reason}"):
        store.load()
    log = store.log()
    with pytest.raises(CorruptVersion, match=f"version 1: .*{reason}"):
        store.activate(1, "operator", "try")
    assert store.log() == log


def test_a_version_of_another_backbone_is_refused_and_both_are_named(store: VersionStore) -> None:
    publish(store, "task-1", None)
    store.load(expect_backbone="b" * 64)
    with pytest.raises(CorruptVersion, match=f"backbone {'b' * 64}, but {'e' * 64} is in use"):
        store.load(expect_backbone="e" * 64)


def test_a_damaged_current_is_said_and_repaired_by_activating(store: VersionStore) -> None:
    publish(store, "task-1", None)
    (store.root / "CURRENT").write_bytes(b"\x00\x00")
    with pytest.raises(CorruptVersion, match=r"CURRENT: .* openworld versions --activate N"):
        store.load()
    store.activate(1, "operator", "repair")
    assert store.load().manifest.version == 1
    assert [p.version for p in store.log()] == [1, 1]


def test_a_version_that_names_an_absent_graph_is_not_published(store: VersionStore) -> None:
    with pytest.raises(CorruptVersion, match=r"graph trunk .* cannot be read"):
        publish(store, "task-1", None, graphs={"trunk": "a" * 64})
    assert (store.versions(), store.current()) == ([], None)


def test_a_graph_is_stored_once_and_a_damaged_copy_is_replaced(store: VersionStore) -> None:
    sha = store.add_graph(b"a graph")
    inode = store.graph_path(sha).stat().st_ino
    assert store.add_graph(b"a graph") == sha
    assert store.graph_path(sha).stat().st_ino == inode
    flip_a_byte(store.graph_path(sha))
    store.add_graph(b"a graph")
    assert store.graph_path(sha).read_bytes() == b"a graph"


# Compare-and-set


def test_a_zombie_trainer_cannot_publish_and_leaves_nothing(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    before = tree(store.root)
    for parent in (None, 1, 7):
        with pytest.raises(StaleParent, match=f"started from version {parent}, but 2 is current"):
            publish(store, "task-3", parent)
    assert tree(store.root) == before


def test_a_trainer_that_turns_zombie_while_it_waits_for_the_lock_is_refused(store: VersionStore) -> None:
    publish(store, "task-1", None)
    errors: list[BaseException] = []

    def late() -> None:
        try:
            publish(store, "late", 1)
        except StaleParent as error:
            errors.append(error)

    thread = threading.Thread(target=late)

    def while_holding_the_lock(step: str) -> None:
        if step == "started":
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()

    publish(VersionStore(store.root, while_holding_the_lock), "task-2", 1)
    thread.join(10)
    assert len(errors) == 1
    assert store.versions() == [1, 2]
    assert store.find_task("late") is None


def test_of_several_publishers_on_one_parent_exactly_one_wins(store: VersionStore) -> None:
    parent: int | None = None
    for generation in (1, 2):
        racers = [start_trainer(store.root, make_manifest(f"g{generation}-{i}", parent), "race") for i in range(4)]
        for racer in racers:
            assert racer.stdout is not None
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("go\n")
            racer.stdin.flush()
        answers = sorted(racer.communicate(timeout=60)[0].strip() for racer in racers)
        assert answers == [str(generation), "stale", "stale", "stale"]
        parent = store.current()
        assert parent == generation
    assert store.versions() == [1, 2]
    assert [(p.previous, p.version) for p in store.log()] == [(None, 1), (1, 2)]
    assert not temporaries(store.root)


# Crashes


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("parent", [None, 1])
def test_a_trainer_killed_at_any_step_publishes_its_task_exactly_once(
    store: VersionStore, step: str, parent: int | None
) -> None:
    if parent:
        publish(store, "task-1", None)
    manifest = make_manifest("killed", parent)
    trainer = start_trainer(store.root, manifest, step)
    assert trainer.communicate(timeout=60)[0] == ""
    assert trainer.returncode == -signal.SIGKILL

    # As it was left, before anybody repairs it: what was current loads, and the log tells the truth.
    assert store.current() == (store.find_task("killed") or parent)
    assert (store.log()[-1].version if store.log() else None) == store.current()
    if store.current():
        store.load()

    if step == "promoted":
        with pytest.raises(StaleParent):
            store.publish(manifest, TENSORS, SAMPLES)
    else:
        assert store.find_task("killed") is None
        store.publish(manifest, TENSORS, SAMPLES)
    learned = [n for n in store.versions() if store.load(n).manifest.task_id == "killed"]
    assert learned == [store.current()] == [store.find_task("killed")]
    assert [p.version for p in store.log()] == store.versions()
    assert not temporaries(store.root)


def leave_unfinished(store: VersionStore, manifest: Manifest) -> None:
    trainer = start_trainer(store.root, manifest, "renamed")
    trainer.communicate(timeout=60)


def test_a_task_retried_on_a_newer_parent_replaces_what_its_killed_attempt_left(store: VersionStore) -> None:
    publish(store, "task-1", None)
    leave_unfinished(store, make_manifest("killed", 1))
    assert store.versions() == [1, 2]
    assert publish(store, "other", 1) == 3
    assert publish(store, "killed", 3) == 3 + 1
    assert store.versions() == [1, 3, 4]
    assert store.find_task("killed") == 4


@pytest.mark.parametrize("same", [True, False])
def test_what_a_killed_attempt_left_is_promoted_only_if_it_is_what_would_be_written(
    store: VersionStore, same: bool
) -> None:
    leave_unfinished(store, make_manifest("killed"))
    left = store.manifest(1)
    tensors, samples = ({"w": np.ones(3)}, {}) if same else (TENSORS, SAMPLES)
    published = store.publish(make_manifest("killed"), tensors, samples)
    assert (published == left) == same
    assert store.load().tensors.keys() == tensors.keys()
    assert len(store.versions()) == 1


def test_an_unfinished_version_that_is_damaged_is_made_anew(store: VersionStore) -> None:
    leave_unfinished(store, make_manifest("killed"))
    flip_a_byte(store.root / "versions/000001/model.safetensors")
    publish(store, "killed", None)
    assert store.load().tensors.keys() == TENSORS.keys()
    assert len(store.versions()) == 1


def test_half_a_folder_is_not_published_over(store: VersionStore) -> None:
    (store.root / "versions/000001").mkdir(parents=True)
    assert publish(store, "task-1", None) == 2
    with pytest.raises(CorruptVersion, match=r"version 1: manifest\.json cannot be read"):
        store.load(1)


def test_what_others_keep_beside_the_store_is_left_alone(store: VersionStore) -> None:
    store.root.mkdir()
    theirs = store.root / ".backbone.json.0123.tmp"
    theirs.write_bytes(b"being written")
    publish(store, "task-1", None)
    assert theirs.exists()


# A full disk


def out_of_space(monkeypatch: pytest.MonkeyPatch, call: str, after: int) -> Callable[[], bool]:
    """Let `after` calls of an os function pass, then fail them all; answers whether any failed."""
    real, count = getattr(os, call), 0

    def limited(*arguments: Any, **keywords: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **keywords)

    monkeypatch.setattr(os, call, limited)
    return lambda: count > after


@pytest.mark.parametrize("call", ["fsync", "write"])
def test_a_full_disk_leaves_the_store_as_it_was(store: VersionStore, call: str) -> None:
    publish(store, "task-1", None)
    before, log = tree(store.root), store.log()
    before.pop("promotions.jsonl")
    for after in range(20):
        with pytest.MonkeyPatch.context() as patch:
            failed = out_of_space(patch, call, after)
            with suppress(StoreError):
                publish(store, "task-2", 1)
        if store.current() != 1:
            break
        assert failed()
        now = tree(store.root)
        now.pop("promotions.jsonl")
        assert now == before
        assert store.log() == log
    # Only the very last fsync, of a CURRENT already replaced, may fail after the fact: then it is published, whole.
    assert after > 3
    assert store.load().manifest.task_id == "task-2"
    assert store.find_task("task-2") == store.current()


def test_a_full_disk_spoils_neither_a_rejection_nor_a_roll_back(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    before = tree(store.root)
    for action in (
        lambda: store.reject(make_manifest("bad", 2), TENSORS, SAMPLES, "forgets"),
        lambda: store.activate(1, "operator", "roll back"),
        lambda: store.add_graph(b"a graph"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            out_of_space(patch, "write", 0)
            with pytest.raises(StoreError, match="No space left"):
                action()
    now = tree(store.root)
    assert {now.pop("rejected"), now.pop("graphs")} == {None}  # empty folders
    assert now == before


# Switching, rejecting, the log


def test_an_operator_rolls_back_and_forward(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    assert store.activate(1, "operator", "too many novel").version == 1
    assert store.load().manifest.task_id == "task-1"
    assert store.find_task("task-2") == 2  # learned, though not current: not to be learned again
    store.activate(2, "operator", "was the camera")
    assert store.load().manifest.task_id == "task-2"
    assert [(p.previous, p.version, p.by) for p in store.log()] == [
        (None, 1, "trainer"),
        (1, 2, "trainer"),
        (2, 1, "operator"),
        (1, 2, "operator"),
    ]


def test_learning_after_a_roll_back_never_reuses_a_number(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    store.activate(1, "operator", "roll back")
    assert publish(store, "task-3", 1) == 3
    for file in (store.root / "versions/000003").iterdir():
        file.unlink()
    (store.root / "versions/000003").rmdir()
    assert store.next_version() == 4


def test_a_version_that_does_not_exist_cannot_be_activated(store: VersionStore) -> None:
    publish(store, "task-1", None)
    with pytest.raises(CorruptVersion, match="version 9"):
        store.activate(9, "operator", "typo")
    assert store.current() == 1


def test_a_rejected_task_is_kept_with_its_reason_and_is_not_current(store: VersionStore) -> None:
    publish(store, "task-1", None)
    for reason in ("accuracy fell", "forgets cats"):
        folder = store.reject(make_manifest("task-2", 1), TENSORS, SAMPLES, reason)
    assert folder == store.root / "rejected/task-2"
    kept = Manifest.from_json((folder / "manifest.json").read_bytes())
    assert kept.metrics == {"accuracy": 0.9, "rejected": "forgets cats"}
    for name, entry in kept.files.items():
        entry.check((folder / name).read_bytes(), name=name)
    assert (store.current(), store.versions(), store.find_task("task-2")) == (1, [1], None)
    assert [p.name for p in folder.parent.iterdir()] == ["task-2"]


def test_the_log_only_grows(store: VersionStore) -> None:
    path, seen, parent = store.root / "promotions.jsonl", b"", None
    for i in range(4):
        parent = publish(store, f"task-{i}", parent)
        assert path.read_bytes().startswith(seen)
        assert path.read_bytes() != seen
        seen = path.read_bytes()


def test_a_line_torn_by_a_crash_costs_only_itself(store: VersionStore) -> None:
    publish(store, "task-1", None)
    path = store.root / "promotions.jsonl"
    with path.open("ab") as log:
        log.write(b'{"time": "2024-')
    assert [p.version for p in store.log()] == [1]
    publish(store, "task-2", 1)
    assert [p.version for p in store.log()] == [1, 2]


def test_a_lost_log_does_not_make_a_task_be_learned_twice(store: VersionStore) -> None:
    publish(store, "task-1", None)
    publish(store, "task-2", 1)
    (store.root / "promotions.jsonl").unlink()
    assert (store.find_task("task-1"), store.find_task("task-2")) == (1, 2)
    publish(store, "task-3", 2)
    assert store.find_task("task-1") == 1
