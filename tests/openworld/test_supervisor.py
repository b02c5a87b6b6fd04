"""Programs are kept running, stopped in order, and never left behind; what they say ends in one stream."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from openworld.up.child_process import CHUNK, ChildProcess
from openworld.up.log_stream import LogStream
from openworld.up.supervisor import FORCED, ONE_WISH, RestartPolicy, Supervisor
from tests.support.paths import ROOT

DRIVER = """
import asyncio, json, logging, os, sys
from models.errors import OpenWorldError
from openworld.up.child_process import ChildProcess
from openworld.up.log_stream import LogStream, OwnLines
from openworld.up.supervisor import RestartPolicy, Supervisor

given = json.loads(sys.argv[1])
stream = LogStream(sys.stderr, "text", ["up", *(name for stage in given["stages"] for name in stage)])
logging.basicConfig(level="INFO", format="%(message)s", handlers=[OwnLines(stream, "up")])

def child(name, code):
    return ChildProcess(name, [sys.executable, "-u", "-c", code], os.environ, lambda line: stream.write(name, line))

stages = [[child(name, code) for name, code in stage.items()] for stage in given["stages"]]
policy = RestartPolicy(*given["back_off"])
try:
    sys.exit(asyncio.run(Supervisor(stages, grace=given["grace"], restart_policy=policy).run()))
except OpenWorldError as error:
    print(f"error: {error}")
    sys.exit(2)
"""
SLEEP = "import os, time; print('pid', os.getpid()); time.sleep(60)"
POLITE = """
import signal, time
def end(number, frame):
    print("told")
    time.sleep(0.3)
    print("gone")
    raise SystemExit
signal.signal(signal.SIGTERM, end)
print("ready")
time.sleep(60)
"""
DEAF = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('pid', os.getpid()); time.sleep(60)"
)


def wait_until(true: Callable[[], bool], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def runs(pid: int) -> bool:
    """A zombie does not: whoever inherited it takes his time."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Supervised:
    """A supervisor in a process of its own, and what it has written so far."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def has(self, *words: str) -> bool:
        return all(any(word in line for line in self.lines) for word in words)

    def pids(self) -> list[int]:
        return [int(line.rpartition("pid ")[2]) for line in self.lines if "| pid " in line]

    def end(self, seconds: float = 10) -> tuple[int, str]:
        out, _ = self.process.communicate(timeout=seconds)
        return self.process.returncode, out


Supervise = Callable[..., Supervised]


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Supervise]:
    started: list[subprocess.Popen[str]] = []

    def start(
        *stages: dict[str, str],
        grace: float = 20,
        back_off: tuple[float, float, float] = (0.05, 0.2, 60),
        shell: str = "",
    ) -> Supervised:
        given = json.dumps({"stages": stages, "grace": grace, "back_off": back_off})
        command = [sys.executable, "-c", DRIVER, given]
        if shell:
            command = ["sh", "-c", f'{shell}; exec "$@"', "sh", *command]
        log = tmp_path / "log"
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True)
        started.append(process)
        return Supervised(process, log)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_program_that_ends_is_started_again_after_ever_longer_pauses(supervise: Supervise) -> None:
    running = supervise({"server": "import time; print('at', time.monotonic()); raise SystemExit(1)"})
    wait_until(lambda: sum("at" in line.split() for line in running.lines if "server" in line) >= 5)
    pauses = re.findall(r"server ended with code 1; starting it again in (\S+) s", running.log.read_text())
    assert pauses[:4] == ["0.05", "0.1", "0.2", "0.2"]
    times = [float(line.split()[-1]) for line in running.lines if "| at " in line]
    assert all(later - earlier >= float(pause) for earlier, later, pause in zip(times, times[1:], pauses, strict=False))


def test_a_run_that_lasted_makes_the_next_pause_short_again(supervise: Supervise) -> None:
    running = supervise({"server": "import time; time.sleep(0.4)"}, back_off=(0.05, 10, 0.3))
    wait_until(lambda: running.log.read_text().count("starting it again in 0.05 s") >= 3)
    assert "again in 0.1 s" not in running.log.read_text()


def test_a_stage_is_stopped_when_those_that_need_it_have_ended(supervise: Supervise) -> None:
    running = supervise({"redis": POLITE}, {"server": POLITE, "trainer": POLITE})
    wait_until(lambda: running.has("redis   | ready", "server  | ready", "trainer | ready"))
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (0, "")
    place = {line: number for number, line in enumerate(running.lines)}
    last_gone = max(place["server  | gone"], place["trainer | gone"])
    assert max(place["server  | told"], place["trainer | told"]) < last_gone < place["redis   | told"]
    assert running.lines[-2:] == ["redis   | gone", "up      | stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_told_twice_in_the_same_moment_it_still_waits(supervise: Supervise, number: int) -> None:
    running = supervise({"server": POLITE})
    wait_until(lambda: running.has("ready"))
    for _ in range(3):
        running.process.send_signal(number)
        time.sleep(0.02)
    assert running.end() == (0, "")
    assert running.has("server | gone")


def test_told_again_it_kills_at_once(supervise: Supervise) -> None:
    running = supervise({"redis": DEAF}, {"server": DEAF})
    wait_until(lambda: len(running.pids()) == 2)
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: running.has("SIGINT: stopping"))
    time.sleep(ONE_WISH)
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (FORCED, "")
    assert not any(map(runs, running.pids()))


def test_a_program_that_does_not_end_in_time_is_killed(supervise: Supervise) -> None:
    running = supervise({"server": DEAF}, grace=0.3)
    wait_until(lambda: bool(running.pids()))
    running.process.terminate()
    assert running.end() == (0, "")
    assert running.has("server has not ended in 0.3 s; killing it")
    assert not runs(running.pids()[0])


def test_a_mistake_in_the_settings_stops_all_and_is_told(supervise: Supervise, tmp_path: Path) -> None:
    wrong = f"""
import sys, time
while "ready" not in open({str(tmp_path / "log")!r}).read():
    time.sleep(0.02)
print("here I am")
print("error: A is wrong:\\nset it to 1", file=sys.stderr)
sys.exit(2)
"""
    running = supervise({"redis": POLITE}, {"trainer": wrong})
    assert running.end() == (2, "error: the trainer cannot start: A is wrong:\nset it to 1\n")
    assert running.log.read_text().count("here I am") == 1
    assert running.lines[-2:] == ["redis   | gone", "up      | stopped"]


def test_of_a_program_that_has_worked_exit_code_2_is_no_wrong_setting(supervise: Supervise) -> None:
    running = supervise({"server": "import time; time.sleep(0.3); raise SystemExit(2)"}, back_off=(0.05, 0.1, 0.2))
    wait_until(lambda: running.log.read_text().count("server ended with code 2; starting it again") >= 2)


def test_no_program_outlives_a_killed_supervisor(supervise: Supervise) -> None:
    running = supervise({"redis": DEAF}, {"server": SLEEP, "trainer": DEAF})
    wait_until(lambda: len(running.pids()) == 3)
    running.process.kill()
    wait_until(lambda: not any(map(runs, running.pids())), 5)


def test_programs_have_a_session_of_their_own_and_take_what_they_started_along(supervise: Supervise) -> None:
    code = "import os, subprocess, time\n"
    code += "print('pid', subprocess.Popen(['sleep', '60']).pid)\nprint('session', os.getsid(0))\ntime.sleep(0.1)"
    running = supervise({"server": code})
    wait_until(lambda: len(running.pids()) >= 2)  # it holds our pipe, which keeps nobody waiting
    first = running.pids()[0]
    wait_until(lambda: not runs(first))
    session = next(line for line in running.lines if "| session " in line)
    assert int(session.split()[-1]) != os.getsid(running.process.pid)


def test_a_hangup_that_is_ignored_stays_so(supervise: Supervise) -> None:
    running = supervise({"server": SLEEP}, shell="trap '' HUP")
    wait_until(lambda: bool(running.pids()))
    running.process.send_signal(signal.SIGHUP)
    running.process.terminate()
    assert running.end() == (0, "")
    assert not running.has("SIGHUP")


@dataclass
class Fake:
    """A program that does as the test says."""

    name: str
    story: list[str]
    is_ready: bool = True
    problems: list[Exception] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self) -> None:
        if self.problems:
            raise self.problems.pop(0)
        self.story.append(f"{self.name} starts")

    async def ready(self) -> None:
        await asyncio.sleep(0.05 if self.is_ready else 60)
        self.story.append(f"{self.name} is ready")

    async def wait(self) -> int:
        await self.ended.wait()
        return 0

    def send(self, number: int) -> None:
        self.story.append(f"{self.name} gets {signal.Signals(number).name}")
        self.ended.set()

    def last_words(self) -> str:
        return ""


def run_until(story: list[str], words: str, *programs: Fake, patience: float = 20) -> int:
    """Supervise them until the story has got so far."""

    async def main() -> int:
        supervisor = Supervisor([programs], grace=1, restart_policy=RestartPolicy(0.01, 0.01), patience=patience)
        running = asyncio.create_task(supervisor.run())
        while words not in story and not running.done():
            await asyncio.sleep(0.005)
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        return await running

    return asyncio.run(main())


def test_a_program_starts_when_the_one_before_is_ready() -> None:
    story: list[str] = []
    assert run_until(story, "trainer is ready", Fake("server", story), Fake("trainer", story)) == 0
    assert story[:4] == ["server starts", "server is ready", "trainer starts", "trainer is ready"]
    assert story[4:] == ["server gets SIGTERM", "trainer gets SIGTERM"]


def test_a_program_that_is_never_ready_does_not_keep_the_others_from_starting() -> None:
    story: list[str] = []
    slow = Fake("server", story, is_ready=False)
    assert run_until(story, "trainer starts", slow, Fake("trainer", story), patience=0.05) == 0


def test_a_program_that_cannot_be_started_now_is_tried_again() -> None:
    story: list[str] = []
    assert run_until(story, "redis starts", Fake("redis", story, problems=[OSError("no"), OSError("no")])) == 0


def test_a_bug_in_one_program_stops_all_and_is_not_lost() -> None:
    story: list[str] = []
    broken = Fake("trainer", story, problems=[ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        run_until(story, "never", Fake("server", story), broken)
    assert "server gets SIGTERM" in story


def said(code: str) -> list[str]:
    """What is heard of a child."""
    heard: list[str] = []

    async def main() -> None:
        child = ChildProcess("child", [sys.executable, "-c", code], os.environ, heard.append)
        await child.start()
        await child.wait()

    asyncio.run(main())
    return heard


def test_lines_are_heard_whole_whatever_the_pieces() -> None:
    code = "import os, time\n"
    for piece in (b"one li", b"ne\ntwo", b"\r\n\n", b"gr\xc3", b"\xbc\xc3\x9fe\nbad \xff\xfe\n", b"no end"):
        code += f"os.write({1 + len(piece) % 2}, {piece!r})\ntime.sleep(0.03)\n"
    assert said(code) == ["one line", "two", "", "grüße", "bad ��", "no end"]


def test_a_line_without_end_is_not_kept_in_memory() -> None:
    heard = said(f"import sys; sys.stdout.write('x' * {5 * CHUNK} + '\\nend\\n')")
    assert sum(map(len, heard[:-1])) == 5 * CHUNK
    assert max(map(len, heard)) <= 2 * CHUNK
    assert heard[-1] == "end"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_names_are_coloured_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal, file = Terminal(), io.StringIO()
    LogStream(terminal, "text", ["up", "server"]).write("up", "hello\nyou")
    LogStream(file, "text", ["up", "server"]).write("up", "hello\nyou")
    assert file.getvalue() == "up     | hello\nup     | you\n"
    assert terminal.getvalue() == "\x1b[32mup     |\x1b[0m hello\n\x1b[32mup     |\x1b[0m you\n"
    monkeypatch.setenv("NO_COLOR", "1")
    LogStream(terminal := Terminal(), "text", ["up", "server"]).write("up", "hello")
    assert terminal.getvalue() == "up     | hello\n"


def test_every_line_is_json_with_its_program_where_json_is_wanted() -> None:
    file = io.StringIO()
    stream = LogStream(file, "json", ["server"])
    for line in ('{"level": "info", "message": "ä"}', "Traceback", '"a string"', "[" * 100_000, '{"a": NaN}'):
        stream.write("server", line)
    found = [json.loads(line) for line in file.getvalue().splitlines()]
    assert found[0] == {"level": "info", "message": "ä", "program": "server"}
    assert [one["program"] for one in found] == ["server"] * 5
    assert [one["message"] for one in found[1:4]] == ["Traceback", '"a string"', "[" * 100_000]


def test_a_stream_that_nobody_reads_stops_nobody() -> None:
    LogStream(Gone(), "text", ["server"]).write("server", "hello")
