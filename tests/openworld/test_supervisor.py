"""The supervisor restarts programs, stops them in order, and leaves no process behind."""

from __future__ import annotations

import asyncio
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

from openworld.up.supervisor import KILLED, RestartPolicy, Supervisor
from tests.support.paths import ROOT
from tests.support.waiting import wait_until

DRIVER = """
import asyncio, json, logging, os, signal, sys
from models.errors import OpenWorldError
from openworld.logs import LogStream, LogStreamHandler
from openworld.up import supervisor
from openworld.up.child_process import ChildProcess
from openworld.up.supervisor import RestartPolicy, Supervisor

given = json.loads(sys.argv[1])
if not given["ignore_hangup"]:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, and inherited so, where the tests run under nohup
stream = LogStream(sys.stderr, "text", ["up", *(name for stage in given["stages"] for name in stage)])
logging.basicConfig(level="INFO", format="%(message)s", handlers=[LogStreamHandler(stream, "up")])

def child(name, code):
    return ChildProcess(name, [sys.executable, "-u", "-c", code], os.environ, lambda line: stream.write(name, line))

stages = [[child(name, code) for name, code in stage.items()] for stage in given["stages"]]
policy = RestartPolicy(*given["back_off"])
supervisor.SAME_SIGNAL_SECONDS = given["same_signal_seconds"]
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


def runs(pid: int) -> bool:
    """True if the process exists and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@dataclass
class Supervised:
    """A supervisor in its own process, and its log."""

    process: subprocess.Popen[str]
    log: Path

    @property
    def lines(self) -> list[str]:
        return self.log.read_text().splitlines()

    def has(self, *words: str) -> bool:
        return all(any(word in line for line in self.lines) for word in words)

    def pids(self) -> list[int]:
        return [int(line.rpartition("pid ")[2]) for line in self.lines if "| pid " in line]

    def end(self, seconds: float = 60) -> tuple[int, str]:
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
        ignore_hangup: bool = False,
        same_signal_seconds: float = 0.5,
    ) -> Supervised:
        given = {"stages": stages, "grace": grace, "back_off": back_off, "ignore_hangup": ignore_hangup}
        given["same_signal_seconds"] = same_signal_seconds
        command = [sys.executable, "-c", DRIVER, json.dumps(given)]
        if ignore_hangup:
            command = ["sh", "-c", """trap '' HUP; exec "$@\"""", "sh", *command]
        log = tmp_path / "log"
        with log.open("w") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=file, text=True)
        started.append(process)
        return Supervised(process, log)

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_a_program_that_ends_is_restarted_after_growing_pauses(supervise: Supervise) -> None:
    running = supervise({"server": "import time; print('at', time.monotonic()); raise SystemExit(1)"})
    wait_until(lambda: sum("at" in line.split() for line in running.lines if "server" in line) >= 5)
    pauses = re.findall(r"server ended with code 1: restart in (\S+) s", running.log.read_text())
    assert pauses[:4] == ["0.05", "0.1", "0.2", "0.2"]
    times = [float(line.split()[-1]) for line in running.lines if "| at " in line]
    assert all(later - earlier >= float(pause) for earlier, later, pause in zip(times, times[1:], pauses, strict=False))


def test_a_long_run_resets_the_pause(supervise: Supervise) -> None:
    running = supervise({"server": "import time; time.sleep(0.4)"}, back_off=(0.05, 10, 0.3))
    wait_until(lambda: running.log.read_text().count("restart in 0.05 s") >= 3)
    assert "restart in 0.1 s" not in running.log.read_text()


def test_later_stages_end_before_earlier_ones_are_stopped(supervise: Supervise) -> None:
    running = supervise({"redis": POLITE}, {"server": POLITE, "trainer": POLITE})
    wait_until(lambda: running.has("redis   | ready", "server  | ready", "trainer | ready"))
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (0, "")
    place = {line: number for number, line in enumerate(running.lines)}
    last_gone = max(place["server  | gone"], place["trainer | gone"])
    assert max(place["server  | told"], place["trainer | told"]) < last_gone < place["redis   | told"]
    assert running.lines[-2:] == ["redis   | gone", "up      | stopped"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_repeated_signals_within_a_moment_count_as_one(supervise: Supervise, number: int) -> None:
    running = supervise({"server": POLITE}, same_signal_seconds=600)
    wait_until(lambda: running.has("ready"))
    for _ in range(3):
        running.process.send_signal(number)
        time.sleep(0.02)
    assert running.end() == (0, "")
    assert running.has("server | gone")


def test_a_second_signal_kills_all_programs(supervise: Supervise) -> None:
    running = supervise({"redis": DEAF}, {"server": DEAF}, grace=600, same_signal_seconds=0)
    wait_until(lambda: len(running.pids()) == 2)
    running.process.send_signal(signal.SIGINT)
    wait_until(lambda: running.has("SIGINT: stopping"))
    running.process.send_signal(signal.SIGINT)
    assert running.end() == (KILLED, "")
    assert not any(map(runs, running.pids()))


def test_a_program_is_killed_after_the_grace_period(supervise: Supervise) -> None:
    running = supervise({"server": DEAF}, grace=0.3)
    wait_until(lambda: bool(running.pids()))
    running.process.terminate()
    assert running.end() == (0, "")
    assert running.has("server has not ended after 0.3 s: killing it")
    assert not runs(running.pids()[0])


def test_a_wrong_setting_stops_all_programs_and_is_reported(supervise: Supervise, tmp_path: Path) -> None:
    wrong = f"""
import sys, time
while "ready" not in open({str(tmp_path / "log")!r}).read():
    time.sleep(0.02)
print("here I am")
print("error: A is wrong:\\nset it to 1", file=sys.stderr)
sys.exit(2)
"""
    running = supervise({"redis": POLITE}, {"trainer": wrong})
    assert running.end() == (2, "error: trainer cannot start: A is wrong:\nset it to 1\n")
    assert running.log.read_text().count("here I am") == 1
    assert running.lines[-2:] == ["redis   | gone", "up      | stopped"]


def test_exit_code_2_after_a_long_run_is_not_a_wrong_setting(supervise: Supervise) -> None:
    running = supervise({"server": "import time; time.sleep(0.3); raise SystemExit(2)"}, back_off=(0.05, 0.1, 0.2))
    wait_until(lambda: running.log.read_text().count("server ended with code 2: restart") >= 2)


def test_no_program_outlives_a_killed_supervisor(supervise: Supervise) -> None:
    running = supervise({"redis": DEAF}, {"server": SLEEP, "trainer": DEAF})
    wait_until(lambda: len(running.pids()) == 3)
    running.process.kill()
    wait_until(lambda: not any(map(runs, running.pids())))


def test_programs_have_their_own_session_and_end_with_their_children(supervise: Supervise) -> None:
    code = "import os, subprocess, time\n"
    code += "print('pid', subprocess.Popen(['sleep', '60']).pid)\nprint('session', os.getsid(0))\ntime.sleep(0.1)"
    running = supervise({"server": code})
    wait_until(lambda: len(running.pids()) >= 2)  # the grandchild keeps the pipe open
    first = running.pids()[0]
    wait_until(lambda: not runs(first))
    session = next(line for line in running.lines if "| session " in line)
    assert int(session.split()[-1]) != os.getsid(running.process.pid)


def test_an_ignored_hangup_stays_ignored(supervise: Supervise) -> None:
    running = supervise({"server": SLEEP}, ignore_hangup=True)
    wait_until(lambda: bool(running.pids()))
    running.process.send_signal(signal.SIGHUP)
    running.process.terminate()
    assert running.end() == (0, "")
    assert not running.has("SIGHUP")


@dataclass
class Fake:
    """A program under control of the test."""

    name: str
    story: list[str]
    configuration_error: int = 2
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

    def last_error(self) -> str:
        return ""


def run_until(story: list[str], words: str, *programs: Fake, patience: float = 20) -> int:
    """Supervise the programs until `words` is in the story, then stop."""

    async def main() -> int:
        supervisor = Supervisor([programs], grace=1, restart_policy=RestartPolicy(0.01, 0.01), patience=patience)
        running = asyncio.create_task(supervisor.run())
        while words not in story and not running.done():
            await asyncio.sleep(0.005)
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        return await running

    return asyncio.run(main())


def test_a_program_starts_when_the_previous_one_is_ready() -> None:
    story: list[str] = []
    assert run_until(story, "trainer is ready", Fake("server", story), Fake("trainer", story)) == 0
    assert story[:4] == ["server starts", "server is ready", "trainer starts", "trainer is ready"]
    assert story[4:] == ["server gets SIGTERM", "trainer gets SIGTERM"]


def test_a_program_that_is_never_ready_does_not_block_the_next_one() -> None:
    story: list[str] = []
    slow = Fake("server", story, is_ready=False)
    assert run_until(story, "trainer starts", slow, Fake("trainer", story), patience=0.05) == 0


def test_a_program_that_cannot_be_started_is_tried_again() -> None:
    story: list[str] = []
    assert run_until(story, "redis starts", Fake("redis", story, problems=[OSError("no"), OSError("no")])) == 0


def test_an_unexpected_error_stops_all_programs_and_is_raised() -> None:
    story: list[str] = []
    broken = Fake("trainer", story, problems=[ZeroDivisionError()])
    with pytest.raises(ZeroDivisionError):
        run_until(story, "never", Fake("server", story), broken)
    assert "server gets SIGTERM" in story
