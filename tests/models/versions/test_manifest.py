"""The manifest: canonical JSON, and errors that name the file and the field."""

import json
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from models.errors import CorruptVersion, StoreError
from models.versions.manifest import MINOR, SCHEMA, FileEntry, Manifest
from tests.support.manifests import make_manifest


def changed(**changes: Any) -> bytes:
    return json.dumps(json.loads(make_manifest().to_json()) | changes).encode()


def test_a_manifest_survives_writing_and_reading() -> None:
    manifest = make_manifest(files={"heads": FileEntry.of(b"abc")})
    assert Manifest.from_json(manifest.to_json()) == manifest


def test_equal_manifests_give_equal_bytes() -> None:
    created = datetime(2024, 1, 1, tzinfo=UTC)
    one = make_manifest(metrics={"a": 1, "b": 2}, created=created)
    other = make_manifest(metrics={"b": 2, "a": 1}, created=created.astimezone(timezone(timedelta(hours=2))))
    assert one.to_json() == other.to_json()
    assert one.to_json().endswith(b"\n")
    assert "dög" in one.to_json().decode()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float32(1), {1, 2}])
def test_a_value_that_is_not_json_is_refused_when_writing(value: Any) -> None:
    with pytest.raises(StoreError, match="the manifest cannot be written as JSON"):
        make_manifest(metrics={"auroc": [value]}).to_json()


def test_a_newer_schema_is_refused_even_if_its_fields_are_unknown() -> None:
    with pytest.raises(CorruptVersion, match=r"m\.json: schema_version 3 is newer than 2.*upgrade openworld"):
        Manifest.from_json(changed(schema_version=SCHEMA + 1, surprise=True), name="m.json")


def test_a_newer_minor_format_loads_without_its_unknown_fields() -> None:
    entry = {"sha256": "a" * 64, "size": 3, "compression": "none"}
    newer = changed(schema_minor=MINOR + 1, surprise={"a": 1}, files={"heads": entry})
    manifest = Manifest.from_json(newer)
    assert (manifest.tasks, manifest.files["heads"].size) == (make_manifest().tasks, 3)
    # A version that is made from it is written, and read again, as this release writes it.
    again = Manifest.from_json(manifest.to_json())
    assert (again.schema_minor, again) == (MINOR, manifest)


def test_a_newer_minor_format_still_needs_valid_fields() -> None:
    with pytest.raises(CorruptVersion, match="field version"):
        Manifest.from_json(changed(schema_minor=MINOR + 1, version="1"))


def test_a_manifest_without_a_minor_format_has_the_first_one() -> None:
    document = json.loads(make_manifest().to_json())
    del document["schema_minor"]
    assert Manifest.from_json(json.dumps(document).encode()).schema_minor == 0


@pytest.mark.parametrize("field", sorted({*Manifest.model_fields} - {"schema_minor"}))
def test_a_missing_field_is_named(field: str) -> None:
    document = json.loads(make_manifest().to_json())
    del document[field]
    with pytest.raises(CorruptVersion, match=rf"m\.json: missing field {field}$"):
        Manifest.from_json(json.dumps(document).encode(), name="m.json")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not JSON"),
        (b'{"version": 1', "not JSON"),
        (b"\xff\xfe{}", "not JSON"),
        (b"[1]", "expected a JSON object"),
        (changed(threshold=float("nan")), "NaN is not allowed"),
        (changed(version="1"), "field version"),
        (changed(surprise=1), "field surprise"),
        (changed(graphs={"trunk": "../../secret"}), r"field graphs\.trunk"),
        (changed(created="2024-01-01T00:00:00"), "field created"),
        (changed(files={"f": {"sha256": "a" * 64, "size": -1}}), r"field files\.f\.size"),
    ],
)
def test_a_malformed_manifest_is_refused_with_the_file_and_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(CorruptVersion, match=rf"^m\.json: .*{reason}"):
        Manifest.from_json(data, name="m.json")


@pytest.mark.parametrize("task_id", ["", ".", "..", "../x", "a/b", ".hidden", "a\n", "x" * 129])
def test_a_task_id_that_is_not_a_plain_name_is_refused(task_id: str) -> None:
    with pytest.raises(ValidationError, match="task_id"):
        make_manifest(task_id=task_id)


def test_a_file_entry_distinguishes_a_short_file_from_a_changed_one() -> None:
    entry = FileEntry.of(b"abc")
    entry.check(b"abc", name="f")
    with pytest.raises(CorruptVersion, match="f has 2 bytes, the manifest says 3"):
        entry.check(b"ab", name="f")
    with pytest.raises(CorruptVersion, match="f does not match its sha256"):
        entry.check(b"abd", name="f")


def test_a_manifest_is_immutable() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        make_manifest().version = 3
