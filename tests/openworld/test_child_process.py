"""Child processes: their output, their session, and their end."""

from __future__ import annotations

import asyncio
import os
import sys

from openworld.up.child_process import CHUNK, ChildProcess


def output_of(code: str) -> list[str]:
    """The lines that a child process writes."""
    lines: list[str] = []

    async def main() -> None:
        child = ChildProcess("child", [sys.executable, "-c", code], os.environ, lines.append)
        await child.start()
        await child.wait()

    asyncio.run(main())
    return lines


def test_lines_are_whole_however_they_are_written() -> None:
    code = "import os, time\n"
    for piece in (b"one li", b"ne\ntwo", b"\r\n\n", b"gr\xc3", b"\xbc\xc3\x9fe\nbad \xff\xfe\n", b"no end"):
        code += f"os.write({1 + len(piece) % 2}, {piece!r})\ntime.sleep(0.03)\n"
    assert output_of(code) == ["one line", "two", "", "grüße", "bad ��", "no end"]


def test_a_line_without_end_is_split() -> None:
    lines = output_of(f"import sys; sys.stdout.write('x' * {5 * CHUNK} + '\\nend\\n')")
    assert sum(map(len, lines[:-1])) == 5 * CHUNK
    assert max(map(len, lines)) <= 2 * CHUNK
    assert lines[-1] == "end"
