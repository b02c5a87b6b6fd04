"""Write the package graph of docs/architecture.md from the imports of the code; run by `make docs`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- begin of the package graph, written by `make docs` -->", "<!-- end of the package graph -->"


def package_graph() -> str:
    """A Mermaid diagram of the packages, and for each package a table of its parts and what each part imports."""
    packages: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["root_packages"]
    graph = grimp.build_graph(*packages, cache_dir=None)
    imports: dict[str, set[str]] = {
        part: set() for package in packages for part in graph.find_children(package) if not part.endswith("__main__")
    }
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if _part(module) != _part(imported):
                imports.setdefault(_part(module), set()).add(_part(imported))
    edges = {(_package(a), _package(b)) for a, targets in imports.items() for b in targets}
    lines = ["```mermaid", "graph TD"]
    lines += [f"    {a} --> {b}" for a, b in sorted(edges) if a != b]
    lines += ["```", ""]
    for package in packages:
        rows = [
            f"| `{part}` | {', '.join(f'`{name}`' for name in sorted(imports[part])) or 'nothing of ours'} |"
            for part in sorted(imports)
            if _package(part) == package and part != package
        ]
        lines += [f"| part of `{package}` | imports |", "| --- | --- |", *rows, ""]
    return "\n".join(lines).rstrip()


def updated(page: str) -> str:
    """The page with the graph as it is now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{package_graph()}\n\n{END}{after}"


def _part(module: str) -> str:
    return ".".join(module.split(".")[:2])


def _package(part: str) -> str:
    return part.partition(".")[0]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
