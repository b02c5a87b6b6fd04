"""What is written about the product is true: links lead somewhere, commands exist, tables are up to date."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from openworld.cli import parser
from tests.support.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]


def _commands(page: Path) -> list[str]:
    """The lines of its code blocks that call `openworld`."""
    blocks = re.findall(r"^```.*?$(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\.venv/bin/)?openworld \w", line)]


COMMANDS = [(page, line) for page in PAGES for line in _commands(page)]


def test_the_table_of_settings_is_what_the_programs_read() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["settings_page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == generated, "run: make docs"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_files_and_headings_lead_somewhere(page: Path) -> None:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in _anchors(file)):
            broken.append(target)
    assert not broken


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_there_are_commands_in_the_documentation() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line[:60] for _, line in COMMANDS])
def test_a_documented_command_is_one_that_exists(page: Path, line: str) -> None:
    command = re.split(r"\s{2,}|\s#|[|&;>]", line)[0]
    words = shlex.split(command)[1:]
    parser().parse_args(words)
