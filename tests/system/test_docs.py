"""The documentation is true: links resolve, commands and files exist, generated parts are up to date."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from openworld.cli import parser
from openworld.environment import DROPPED, KNOWN, PREFIX, RENAMED
from tests.support.paths import ROOT

PAGES = sorted(
    {
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").rglob("*.md"),
    }
)
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("[0-9]*.md"))
# A path of this repository: a folder with its slash, or a file; `:name` after it is a definition in that file.
FOLDERS = "models|tasks|trainer|service|openworld|tests|docs|deploy|benchmarks|examples|\\.github"
PATH = re.compile(
    rf"(?<![\w/.<-])((?:{FOLDERS})/(?:[\w.*-]+/)*(?:[\w.*-]+\.(?:py|lua|md|json|yml|toml|sh|html|js|css))?)(?::(\w+))?"
)
HISTORY = {"CHANGELOG.md"}  # it also names files and settings of earlier releases


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _commands(page: Path) -> list[str]:
    """The lines of a page's code blocks that call `openworld`."""
    blocks = re.findall(r"^```.*?$(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(\.venv/bin/)?openworld \w", line)]


COMMANDS = [(page, line) for page in PAGES for line in _commands(page)]


# Generated parts


def test_the_settings_page_is_what_the_programs_read() -> None:
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["settings_page"]()
    assert (ROOT / "docs" / "settings.md").read_text() == generated, "run: make docs"


def test_the_figures_of_the_accuracy_page_are_those_of_the_reports() -> None:
    page = (ROOT / "docs" / "accuracy.md").read_text()
    assert page == runpy.run_path(str(ROOT / "docs" / "accuracy_figures.py"))["updated"](page), "run: make docs"


def test_the_package_graph_is_that_of_the_code() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    assert page == runpy.run_path(str(ROOT / "docs" / "package_graph.py"))["updated"](page), "run: make docs"


# Links, files and commands


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_to_files_and_headings_resolve(page: Path) -> None:
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


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=named)
def test_files_and_definitions_that_a_page_names_exist(page: Path) -> None:
    missing = []
    for path, name in PATH.findall(page.read_text()):
        files = list(ROOT.glob(path.rstrip("/")))
        defined = not name or any(re.search(rf"\b{name}\b", file.read_text()) for file in files if file.is_file())
        if not files or not defined:
            missing.append(f"{path}:{name}" if name else path)
    assert not missing


def test_the_architecture_page_names_files() -> None:
    assert len(PATH.findall((ROOT / "docs" / "architecture.md").read_text())) >= 30


def test_there_are_commands_in_the_documentation() -> None:
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[line[:60] for _, line in COMMANDS])
def test_a_documented_command_exists(page: Path, line: str) -> None:
    command = re.split(r"\s{2,}|\s#|[|&;>]", line)[0]
    words = shlex.split(command)[1:]
    parser().parse_args(words)


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in HISTORY], ids=named)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    assert set(re.findall(r"OPENWORLD_[A-Z_]*[A-Z]", page.read_text())) <= KNOWN


def test_the_changelog_lists_every_new_renamed_and_removed_setting() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    rows = dict(re.findall(rf"^\| `{PREFIX}(\w+)` \| (.+) \|$", text, re.MULTILINE))
    wrong = {old for old, now in rows.items() if not set(re.findall(r"`(\w+)`", now)) <= KNOWN}
    assert not wrong
    assert not {f"{PREFIX}{old}" for old in rows} & KNOWN
    assert set(RENAMED) <= set(rows)
    assert {name for name in KNOWN if re.match(rf"{PREFIX}(SERVE|TRAIN|UP)_", name)} <= set(
        re.findall(r"`(\w+)`", text)
    )
    assert not [name for name in DROPPED if f"`{PREFIX}{name}`" not in text]


def test_dashboards_and_panels_that_the_operations_page_names_exist() -> None:
    dashboards = "".join(path.read_text() for path in (ROOT / "deploy" / "grafana" / "dashboards").glob("*.json"))
    named = re.findall(r"(?<![*\w])\*(?!\*)([A-Z][^*\n]+)\*(?!\*)", (ROOT / "docs" / "operations.md").read_text())
    assert named
    assert [title for title in named if f'"title": "{title}"' not in dashboards] == []


# Decisions


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.name[:4])
def test_a_decision_has_its_three_parts_and_is_in_the_index(page: Path) -> None:
    text = page.read_text()
    assert re.match(rf"# {page.name[:4]}: \S", text)
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    title = text.partition(": ")[2].partition("\n")[0]
    assert f"| [{page.name[:4]}]({page.name}) | {title} |" in (page.parent / "README.md").read_text()


def test_decisions_are_numbered_without_gaps() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
