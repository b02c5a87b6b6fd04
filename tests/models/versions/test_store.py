"""The version store: publishing, loading, and refusing damaged versions."""

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from models.errors import CorruptVersion, NothingLearned, StoreError
from models.versions.store import VersionStore
from tests.support.manifests import make_manifest
from tests.support.version_stores import SAMPLES, TENSORS, flip_byte, publish, temporaries, tree


def test_a_published_version_is_current_and_loads_unchanged(store: VersionStore) -> None:
    graph = store.add_graph(b"a graph")
    published = store.publish(make_manifest(graphs={"trunk": graph}), TENSORS, SAMPLES)
    loaded = store.load()
    assert store.current() == published.version == 1
    assert loaded.manifest == published == store.manifest(1)
    assert loaded.samples == SAMPLES
    assert {k: v.tolist() for k, v in loaded.tensors.items()} == {k: v.tolist() for k, v in TENSORS.items()}
    assert sorted(tree(store.root)) == sorted(
        [
            *("CURRENT", "FORMAT", "graphs", "heads", "promotions", "samples", "versions"),
            *("versions/000001.json", "promotions/000000001.json", f"graphs/{graph}.onnx"),
            *(str(store.content_path(1, role).relative_to(store.root)) for role in ("heads", "samples")),
        ]
    )
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
def test_tensors_of_any_type_and_shape_load_unchanged_even_views(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = VersionStore(Path(folder))
        views = {name: tensor.T for name, tensor in tensors.items()}
        store.publish(make_manifest(), views, None)
        loaded = store.load().tensors
    assert loaded.keys() == views.keys()
    for name, view in views.items():
        assert loaded[name].dtype == view.dtype
        np.testing.assert_array_equal(loaded[name], view, strict=True)


def test_a_tensor_that_cannot_be_stored_is_refused_before_anything_is_written(store: VersionStore) -> None:
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
    assert (store.root / "versions").stat().st_mode & 0o777 == 0o755
    for path in (store.root / "CURRENT", store.manifest_path(1), store.content_path(1, "heads")):
        assert path.stat().st_mode & 0o777 == 0o644


# Damage


def edit_manifest(store: VersionStore, /, **changes: Any) -> None:
    path = store.manifest_path(1)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def graph(store: VersionStore) -> Path:
    return next((store.root / "graphs").iterdir())


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda s: flip_byte(s.content_path(1, "heads")), r"heads does not match its sha256"),
        (lambda s: flip_byte(s.content_path(1, "samples")), r"samples does not match its sha256"),
        (lambda s: flip_byte(s.content_path(1, "task.0")), r"task\.0 does not match its sha256"),
        (lambda s: s.content_path(1, "task.0").unlink(), r"task\.0 cannot be read: No such file"),
        (lambda s: os.truncate(s.content_path(1, "heads"), 5), r"heads has 5 bytes"),
        (lambda s: s.manifest_path(1).write_text("{"), r"manifest: not JSON"),
        (lambda s: s.manifest_path(1).unlink(), r"manifest cannot be read: No such file"),
        (lambda s: edit_manifest(s, schema_version=3), "upgrade openworld"),
        (lambda s: edit_manifest(s, version=7), "says it is version 7"),
        (lambda s: edit_manifest(s, files={}), r"its manifest lists no heads and no samples"),
        (lambda s: flip_byte(graph(s)), r"graph trunk .* does not match its sha256"),
        (lambda s: graph(s).unlink(), r"graph trunk .* cannot be read: No such file"),
    ],
)
def test_a_damaged_version_is_refused_with_the_reason(
    store: VersionStore, damage: Callable[[VersionStore], None], reason: str
) -> None:
    tensors = TENSORS | {"task.0/w": np.ones(20)}
    store.publish(make_manifest(graphs={"trunk": store.add_graph(b"a graph")}), tensors, SAMPLES)
    damage(store)
    with pytest.raises(CorruptVersion, match=f"version 1: .*{reason}"):
        store.load()
    log = store.log()
    with pytest.raises(CorruptVersion, match=f"version 1: .*{reason}"):
        store.activate(1, "operator", "try")
    assert store.log() == log


def test_a_version_of_another_backbone_is_refused(store: VersionStore) -> None:
    publish(store, "task-1", None)
    store.load(expect_backbone="b" * 64)
    with pytest.raises(CorruptVersion, match=f"backbone {'b' * 64}, but {'e' * 64} is in use"):
        store.load(expect_backbone="e" * 64)


def test_activating_a_version_repairs_a_damaged_current_file(store: VersionStore) -> None:
    publish(store, "task-1", None)
    (store.root / "CURRENT").write_bytes(b"\x00\x00")
    with pytest.raises(CorruptVersion, match=r"CURRENT: .* openworld versions --activate N"):
        store.load()
    store.activate(1, "operator", "repair")
    assert store.load().manifest.version == 1
    assert [p.version for p in store.log()] == [1, 1]


def test_a_version_with_a_missing_graph_is_not_published(store: VersionStore) -> None:
    with pytest.raises(CorruptVersion, match=r"graph trunk .* cannot be read"):
        publish(store, "task-1", None, graphs={"trunk": "a" * 64})
    assert (store.versions(), store.current()) == ([], None)


def test_a_graph_is_stored_once_and_a_damaged_copy_is_replaced(store: VersionStore) -> None:
    sha = store.add_graph(b"a graph")
    inode = store.graph_path(sha).stat().st_ino
    assert store.add_graph(b"a graph") == sha
    assert store.graph_path(sha).stat().st_ino == inode
    flip_byte(store.graph_path(sha))
    store.add_graph(b"a graph")
    assert store.graph_path(sha).read_bytes() == b"a graph"
