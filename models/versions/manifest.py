"""The manifest: the description of a version, with the hash of each of its contents."""

import json
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)

from models.errors import CorruptVersion, StoreError
from models.files import sha256_bytes

# A release that adds fields raises MINOR: older releases ignore them. One that changes the meaning of a field, or that
# cannot be read without a new field, raises SCHEMA: older releases refuse it.
SCHEMA, MINOR = 2, 2

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# A task's id is the name of a folder (`rejected/<task_id>`): no separators, no leading dot.
TaskId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


class FileEntry(BaseModel):
    """The expected hash and size of a file of the version."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: Sha256
    size: int = Field(ge=0)

    @classmethod
    def of(cls, data: bytes) -> Self:
        return cls(sha256=sha256_bytes(data), size=len(data))

    def check(self, data: bytes, *, name: str) -> None:
        """Raise CorruptVersion, with the file's `name`, unless `data` has this size and hash."""
        if len(data) != self.size:
            raise CorruptVersion(f"{name} has {len(data)} bytes, the manifest says {self.size}", "changed")
        if sha256_bytes(data) != self.sha256:
            raise CorruptVersion(f"{name} does not match its sha256: its bytes were changed", "changed")


class PendingTask(BaseModel):
    """A task that is not learned yet: its classes answer in closed form."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    task_id: TaskId
    submission: str | None = None


class Manifest(BaseModel):
    """A version. The store fills in `version` (0 before that), and adds to `files` what it writes."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    schema_version: int = Field(default=SCHEMA, ge=1)
    schema_minor: int = Field(default=MINOR, ge=0)
    version: int = Field(default=0, ge=0)
    parent: int | None
    task_id: TaskId
    submission: str | None = None  # of the task to the queue: a batch that is submitted again has another one
    tasks: list[list[str]]  # the names of the classes
    class_ids: list[list[str]]  # in the same order; see models/versions/class_ids.py
    aliases: dict[str, str | None] = Field(default_factory=dict)  # see models/versions/edits.py
    backbone: dict[str, Any]
    backbone_sha256: str
    preprocessing_sha256: str
    graphs: dict[str, Sha256]
    rule: dict[str, Any]
    # Provisional: some tasks are pending (trainer/learning/provisional.py). They come last in `tasks`.
    stage: Literal["provisional", "refined"] = "refined"
    pending: list[PendingTask] = Field(default_factory=list)
    refined_rule: dict[str, Any] | None = None  # of a provisional version: the rule of the version without them
    threshold: float | None  # a lower novelty score is novel; None: every image is
    novel_above: float = Field(ge=0, le=1)  # the same threshold as a probability: a larger p_novel is novel
    metrics: dict[str, Any]
    settings: dict[str, Any]
    data_sha256: str
    # What the data folder kept of taught images (models/versions/keep.py): gate and decisions were fitted on that.
    keep: Literal["images", "features", "statistics"] = "images"
    created: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    files: dict[str, FileEntry] = Field(default_factory=dict)  # contents by role: models/versions/contents.py

    @field_validator("created")
    @classmethod
    def _in_utc(cls, value: datetime) -> datetime:
        return value.astimezone(UTC)

    @model_validator(mode="after")
    def _one_id_per_class(self) -> Self:
        ids = [id for task in self.class_ids for id in task]
        if [len(task) for task in self.class_ids] != [len(task) for task in self.tasks] or len({*ids}) != len(ids):
            raise ValueError("class_ids must have one id for each class of tasks, and no id twice")
        return self

    @model_validator(mode="after")
    def _provisional_while_tasks_are_pending(self) -> Self:
        if (self.stage == "provisional") != bool(self.pending) or bool(self.pending) != bool(self.refined_rule):
            raise ValueError("a provisional version, and no other, has pending tasks and the rule without them")
        return self

    def has_learned(self, task_id: str) -> bool:
        """Whether this is the version in which the task was learned, not one in which it is pending."""
        return self.task_id == task_id and not self.is_pending(task_id)

    def is_pending(self, task_id: str, submission: str | None = None) -> bool:
        """Whether the classes of the task answer in closed form; of any submission by default."""
        return any(one.task_id == task_id and submission in (None, one.submission) for one in self.pending)

    @property
    def learned_tasks(self) -> int:
        """The number of tasks with a content of their own; those after them in `tasks` are pending."""
        return sum(role.startswith("task.") for role in self.files)

    @property
    def id_of(self) -> dict[str, str]:
        """From each class to its id."""
        return dict(zip(self.classes, (id for task in self.class_ids for id in task), strict=True))

    @property
    def classes(self) -> list[str]:
        """All classes, in the order of the tasks."""
        return [name for names in self.tasks for name in names]

    @property
    def active_classes(self) -> list[str]:
        """The classes that the version can answer and that a batch may extend: neither merged nor retired."""
        return [name for name in self.classes if name not in self.aliases]

    def to_json(self) -> bytes:
        """Canonical JSON: equal manifests give equal bytes."""
        return canonical_json(self.model_dump(), what="the manifest")

    @classmethod
    def from_json(cls, data: bytes, *, name: str = "manifest") -> Self:
        """Read a manifest; `name` is the file's name in error messages."""
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
        minor = document.setdefault("schema_minor", 0)
        if minor == 0:
            document = {"stage": "refined", "pending": [], "refined_rule": None, **document}
        if minor in (0, 1):
            document = {"keep": "images", **document}
        if isinstance(minor, int) and minor > MINOR:
            document = _known_fields(cls, document)
        # Defaults are for new manifests; a written one has every field.
        missing = [field for field in cls.model_fields if field not in document]
        if missing:
            raise CorruptVersion(f"{name}: missing field {', '.join(missing)}")
        try:
            return cls.model_validate_json(json.dumps(document), strict=True)
        except ValidationError as error:
            raise CorruptVersion(f"{name}: {field_errors(error)}") from error


def _known_fields(kind: type[Manifest], document: dict[str, Any]) -> dict[str, Any]:
    """A document of a newer minor format without the fields that this release does not know."""
    known = {name: value for name, value in document.items() if name in kind.model_fields} | {"schema_minor": MINOR}
    if isinstance(files := known.get("files"), dict):
        known["files"] = {
            name: {field: entry[field] for field in FileEntry.model_fields if field in entry}
            if isinstance(entry, dict)
            else entry
            for name, entry in files.items()
        }
    return known


def field_errors(error: ValidationError) -> str:
    """All problems of a document in one line."""
    return "; ".join(f"field {'.'.join(map(str, e['loc'])) or '(all)'}: {e['msg']}" for e in error.errors())


def canonical_json(value: Any, *, what: str) -> bytes:
    """JSON with sorted keys and without NaN: equal documents give equal bytes."""
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False, ensure_ascii=False, default=_iso)
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
    raise TypeError(f"{type(value).__name__} is not a JSON type; convert it to a plain Python value")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not allowed")
