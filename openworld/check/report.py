"""What the checks report: problems, which are wrong, and notes, which are only worth knowing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Finding:
    """Something that should not be. `code` and `subject` identify it; the message says what to do."""

    code: str
    subject: str
    message: str
    note: bool = False  # worth knowing, but not wrong

    @property
    def identity(self) -> tuple[str, str]:
        return self.code, self.subject


Check = Callable[[], Iterator[Finding]]


@dataclass
class Report:
    """The result of a check."""

    data: str
    problems: list[Finding] = field(default_factory=list)
    notes: list[Finding] = field(default_factory=list)
    checked: dict[str, int] = field(default_factory=dict)  # what -> how many
    skipped: dict[str, str] = field(default_factory=dict)  # what -> why

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, findings: list[Finding]) -> None:
        self.problems += [finding for finding in findings if not finding.note]
        self.notes += [finding for finding in findings if finding.note]

    def to_dict(self) -> dict[str, Any]:
        def shown(finding: Finding) -> dict[str, str]:
            return {"code": finding.code, "subject": finding.subject, "message": finding.message}

        return {
            **{name: value for name, value in asdict(self).items() if name not in ("problems", "notes")},
            "ok": self.ok,
            "problems": [shown(finding) for finding in self.problems],
            "notes": [shown(finding) for finding in self.notes],
        }
