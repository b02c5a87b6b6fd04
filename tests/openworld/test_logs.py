"""The log stream of several programs."""

from __future__ import annotations

import io
import json

import pytest

from openworld.logs import LogStream


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_program_names_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = Terminal(), io.StringIO()
    LogStream(terminal, "text", ["up", "server"]).write("up", "hello\nyou")
    LogStream(file, "text", ["up", "server"]).write("up", "hello\nyou")
    assert file.getvalue() == "up     | hello\nup     | you\n"
    assert terminal.getvalue() == "\x1b[32mup     |\x1b[0m hello\n\x1b[32mup     |\x1b[0m you\n"
    monkeypatch.setenv("NO_COLOR", "1")
    LogStream(terminal := Terminal(), "text", ["up", "server"]).write("up", "hello")
    assert terminal.getvalue() == "up     | hello\n"


def test_every_line_is_json_with_its_program() -> None:
    file = io.StringIO()
    stream = LogStream(file, "json", ["server"])
    for line in ('{"level": "info", "message": "ä"}', "Traceback", '"a string"', "[" * 100_000, '{"a": NaN}'):
        stream.write("server", line)
    found = [json.loads(line) for line in file.getvalue().splitlines()]
    assert found[0] == {"level": "info", "message": "ä", "program": "server"}
    assert [one["program"] for one in found] == ["server"] * 5
    assert [one["message"] for one in found[1:4]] == ["Traceback", '"a string"', "[" * 100_000]


def test_a_closed_stream_raises_no_error() -> None:
    LogStream(Closed(), "text", ["server"]).write("server", "hello")
