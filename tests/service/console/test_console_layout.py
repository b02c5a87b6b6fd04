"""The layout of tables and charts: words of the audit page stay whole, texts of a chart are not crossed by lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.browsers import playwright, visit
from tests.support.servers import learned_folder, running_server

expect = playwright.expect

LINES = """cells => cells.map(cell => {
  const range = document.createRange();
  range.selectNodeContents(cell);
  return new Set([...range.getClientRects()].map(({ top }) => top)).size;
})"""
# Whether the text of a mark overlaps a grid line or a curve.
CROSSED = """chart => {
  const box = (element) => element.getBoundingClientRect();
  const text = box(chart.querySelector(".mark-text"));
  const highest = Math.min(...[...chart.querySelectorAll(".gridline, .line")].map((line) => box(line).top));
  return text.bottom > highest;
}"""


def test_names_and_addresses_of_the_audit_page_stay_on_one_line(browser: Any, tmp_path: Path) -> None:
    with running_server(learned_folder(tmp_path / "robot"), threads=1) as server:
        reason = "the robot in the second hall answers with the wrong fruit since this morning, see the ticket " * 4
        for version in (2, 3):
            server.post(f"/versions/{version}/activate", params={"reason": reason}).raise_for_status()
        for width in (1000, 1400):
            with visit(browser, server.url, {"width": width, "height": 1000}) as visiting:
                page = visiting.open("audit")
                expect(page.locator("tbody tr").first).to_be_visible()
                for column in (2, 6):
                    lines = page.locator(f"tbody td:nth-child({column})").evaluate_all(LINES)
                    assert lines, column
                    assert set(lines) == {1}, (width, column, lines)
                visiting.expect_error("/tasks")  # this server has no queue


def test_the_text_of_a_mark_is_above_the_lines_of_its_chart(browser: Any, tmp_path: Path) -> None:
    with (
        running_server(learned_folder(tmp_path / "robot"), threads=1) as server,
        visit(browser, server.url) as visiting,
    ):
        page = visiting.open("versions/3")
        expect(page.locator(".threshold .mark-text")).to_have_text("this version")
        assert not page.locator(".threshold .chart").evaluate(CROSSED)
        visiting.expect_error("/tasks")
