"""What a version says about itself: `manifest.json`, the one file that vouches for all the others."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator

from models.errors import CorruptVersion, StoreError
from models.files import sha256_bytes

SCHEMA = 1

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# A task's id names a folder (`rejected/<task_id>`), so it must not be able to leave its parent.
TaskId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


class FileEntry(BaseModel):
    """One file of the version: what its bytes must hash to, and how many there must be."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: Sha256
    size: int = Field(ge=0)

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(sha256=sha256_bytes(data), size=len(data))

    def check(self, data: bytes, *, name: str) -> None:
        """CorruptVersion, blaming the file `name`, unless these are the very bytes."""
        if len(data) != self.size:
            raise CorruptVersion(f"{name} has {len(data)} bytes, the manifest says {self.size}", "changed")
        if sha256_bytes(data) != self.sha256:
            raise CorruptVersion(f"{name} does not match its sha256: its bytes were changed", "changed")


class Manifest(BaseModel):
    """One version. `version` and `files` are filled in by the store; 0 means not numbered yet."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = Field(default=SCHEMA, ge=1)
    version: int = Field(default=0, ge=0)
    parent: int | None
    task_id: TaskId
    tasks: list[list[str]]
    aliases: dict[str, str | None] = Field(default_factory=dict)  # see models/edits.py
    backbone: dict[str, Any]
    backbone_sha256: str
    preprocessing_sha256: str
    graphs: dict[str, Sha256]
    rule: dict[str, Any]
    threshold: float | None
    metrics: dict[str, Any]
    settings: dict[str, Any]
    data_sha256: str
    created: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    files: dict[str, FileEntry] = Field(default_factory=dict)

    @field_validator("created")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        return value.astimezone(UTC)

    @property
    def classes(self) -> list[str]:
        """All classes, in the order of the tasks."""
        return [name for names in self.tasks for name in names]

    @property
    def active_classes(self) -> list[str]:
        """The classes that the version can answer and that a batch may extend: neither merged nor retired."""
        return [name for name in self.classes if name not in self.aliases]

    def sealed(self, files: Mapping[str, bytes]) -> Self:
        """This manifest, vouching for these files."""
        return self.model_copy(update={"files": {name: FileEntry.of(data) for name, data in files.items()}})

    def to_json(self) -> bytes:
        """The canonical text: the same manifest gives the same bytes."""
        return canonical_json(self.model_dump(), what="the manifest")

    @classmethod
    def from_json(cls, data: bytes, *, name: str = "manifest.json") -> Self:
        """Read a manifest; `name` is the file that an error will blame."""
        document = parse_json(data, name=name)
        if not isinstance(document, dict):
            raise CorruptVersion(f"{name}: expected a JSON object, found {type(document).__name__}")
        schema = document.get("schema_version")
        if isinstance(schema, int) and schema > SCHEMA:
            raise CorruptVersion(
                f"{name}: schema_version {schema} is newer than {SCHEMA}, "
                "the newest that this openworld reads; upgrade openworld",
                "schema",
            )
        # Defaults are for those who write a manifest; one that was written has every field.
        missing = [field for field in cls.model_fields if field not in document]
        if missing:
            raise CorruptVersion(f"{name}: missing field {', '.join(missing)}")
        try:
            return cls.model_validate_json(data, strict=True)
        except ValidationError as error:
            problems = (f"field {'.'.join(map(str, e['loc'])) or '(all)'}: {e['msg']}" for e in error.errors())
            raise CorruptVersion(f"{name}: {'; '.join(problems)}") from error


def canonical_json(value: Any, *, what: str) -> bytes:
    """Sorted keys and no NaN, so that the hash of a document is the hash of what it says."""
    try:
        text = json.dumps(value, sort_keys=True, indent=1, allow_nan=False, ensure_ascii=False, default=_iso)
        return (text + "\n").encode()
    except (TypeError, ValueError) as error:
        raise StoreError(f"{what} cannot be written as JSON: {error}") from error


def parse_json(data: bytes, *, name: str) -> Any:
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CorruptVersion(f"{name}: not JSON ({error})") from error


def _iso(value: object) -> str:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"a {type(value).__name__} is not JSON; convert it to a plain Python value")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")
