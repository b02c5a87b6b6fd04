"""`python -m benchmarks.soak --minutes 20 --json OUT`: random faults and random work, then `openworld check`.

`openworld up` runs on a small disk of its own (tmpfs, where this user may mount one). At random moments server, trainer
and Redis are killed, and the disk is filled up. Meanwhile clients predict, submit and abort batches, edit classes, roll
back, erase images and make backups. Afterwards every accepted task must have ended, and `openworld check` must
find nothing wrong. Exit code 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.machine import machine
from benchmarks.serving.load import HOST
from benchmarks.serving.made_images import make_image
from benchmarks.serving.process import free_port
from models.files import sha256_bytes

PROGRAMS = {"server": "\0serve\0", "trainer": "\0train\0", "redis": "unixsocket"}  # part of the command line of each
ENDED = ("published", "rejected", "failed", "cancelled")
SETTINGS = {
    "OPENWORLD_TRAIN_EPOCHS": "2",
    "OPENWORLD_TRAIN_BACK_EPOCHS": "1",
    "OPENWORLD_TRAIN_BOTTLENECK": "8",
    "OPENWORLD_TRAIN_KEEP_PER_CLASS": "6",
    "OPENWORLD_TRAIN_LEASE_SECONDS": "5",
    "OPENWORLD_TRAIN_METRICS_PORT": "0",
    "OPENWORLD_LOG_FORMAT": "json",
}
FULL_SECONDS = 5.0  # for which the disk stays full
SETTLE_SECONDS = 900.0  # for the tasks that wait when the faults end
# Mean seconds between two actions of a kind.
PAUSES = {
    "predict": 0.3,
    "submit": 12.0,
    "abort an upload": 20.0,
    "edit a class": 25.0,
    "roll back": 40.0,
    "erase": 15.0,
    "back up": 90.0,
    "kill": 12.0,
    "fill the disk": 75.0,
}


@dataclass
class Soak:
    """The state that the actors share."""

    data: Path
    backups: Path
    url: str
    up: subprocess.Popen[bytes]
    seed: int
    filler: Path | None  # on the disk of the data folder; None: the disk is not filled
    stop: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[str] = field(default_factory=Counter)
    accepted: dict[str, None] = field(default_factory=dict)  # ids of tasks, in the order of acceptance
    images: list[str] = field(default_factory=list)  # hashes of submitted images
    failures: list[str] = field(default_factory=list)

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def request(self, what: str, method: str, path: str, **arguments: Any) -> httpx.Response | None:
        """Send a request and count its status; None if the server is down."""
        try:
            response = httpx.request(method, f"{self.url}{path}", timeout=60, **arguments)
        except httpx.TransportError:
            self.count(f"{what}: no answer")
            return None
        self.count(f"{what}: {response.status_code}")
        if response.status_code == 500:
            self.failures.append(f"{what}: 500 {response.text[:300]}")
        return response

    def children(self) -> dict[str, int]:
        """The processes that `openworld up` has started: program -> process id."""
        found: dict[str, int] = {}
        for pid in Path(f"/proc/{self.up.pid}/task/{self.up.pid}/children").read_text().split():
            with suppress(OSError):
                line = Path(f"/proc/{pid}/cmdline").read_text()
                found |= {name: int(pid) for name, part in PROGRAMS.items() if part in line}
        return found


# What the actors do; each call is one action


def predict(soak: Soak, rng: random.Random) -> None:
    image = make_image(f"kind {rng.randrange(60)}", rng.randrange(10**6))
    soak.request("predict", "POST", "/predict", content=image, headers={"Content-Type": "image/jpeg"})


def submit(soak: Soak, rng: random.Random) -> None:
    names = [f"kind {rng.randrange(40)}" for _ in range(2)]
    start = rng.randrange(10**6)
    files = [(name, (f"{n}.jpg", make_image(name, start + n))) for name in dict.fromkeys(names) for n in range(4)]
    key = {"Idempotency-Key": f"{soak.seed}-{start}"}
    for _ in range(20):  # as a client should: the same batch with the same key until there is an answer
        answer = soak.request("submit", "POST", "/tasks", files=files, headers=key)
        if answer is not None and answer.status_code == 202:
            with soak.lock:
                soak.accepted[answer.json()["id"]] = None
                soak.images += [sha256_bytes(data) for _, (_, data) in files]
            return
        if answer is not None and answer.status_code not in (429, 500, 503, 507):
            return
        if soak.stop.wait(2):
            return


def abort_upload(soak: Soak, rng: random.Random) -> None:
    """Send the first part of a batch, and close the connection."""
    host, _, port = soak.url.removeprefix("http://").partition(":")
    head = (
        f"POST /tasks HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 1000000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n"
        'Content-Disposition: form-data; name="half"; filename="1.jpg"\r\n\r\n'
    )
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(head.encode() + rng.randbytes(rng.randrange(200_000)))
        soak.count("abort an upload: aborted")


def edit_class(soak: Soak, rng: random.Random) -> None:
    listed = soak.request("list classes", "GET", "/classes")
    entries = listed.json()["classes"] if listed is not None and listed.status_code == 200 else []
    if not entries:
        return
    chosen, other = rng.choice(entries), rng.choice(entries)
    if chosen["state"] != "active":
        change: dict[str, Any] = {"retired": False}
    else:
        renamed = {"rename": f"renamed {rng.randrange(10**6)}"}
        change = rng.choice([{"retired": True}, {"merge_into": other["name"]}, renamed, renamed])
    soak.request("edit a class", "PATCH", f"/classes/{chosen['name']}", json=change)


def roll_back(soak: Soak, rng: random.Random) -> None:
    listed = soak.request("list versions", "GET", "/versions")
    numbers = [one["version"] for one in listed.json()["versions"]] if listed and listed.status_code == 200 else []
    if numbers:
        body = {"reason": "soak"}
        soak.request("roll back", "POST", f"/versions/{rng.choice(numbers[-8:])}/activate", json=body)


def erase(soak: Soak, rng: random.Random) -> None:
    listed = soak.request("list novelties", "GET", "/novelties?limit=20")
    items = listed.json()["items"] if listed is not None and listed.status_code == 200 else []
    if items and rng.random() < 0.5:
        soak.request("delete a novelty", "DELETE", f"/novelties/{rng.choice(items)['id']}")
    elif soak.images:
        soak.request("erase", "DELETE", f"/images/{rng.choice(soak.images)}?force=true")


def back_up(soak: Soak, rng: random.Random) -> None:
    target = soak.backups / f"{time.monotonic_ns()}"
    done = _openworld("backup", str(target), "--data", str(soak.data))
    soak.count(f"back up: exit code {done.returncode}")


def kill(soak: Soak, rng: random.Random) -> None:
    children = soak.children()
    if children:
        name = rng.choice(sorted(children))
        with suppress(ProcessLookupError):
            os.kill(children[name], signal.SIGKILL)
            soak.count(f"kill: {name}")


def fill_disk(soak: Soak, rng: random.Random) -> None:
    """Fill the disk for some seconds; everything must recover when there is space again."""
    if soak.filler is None:
        return
    try:
        with suppress(OSError), soak.filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
        soak.count("fill the disk: full")
        soak.stop.wait(FULL_SECONDS)
    finally:
        soak.filler.unlink(missing_ok=True)


ACTORS: dict[str, Callable[[Soak, random.Random], None]] = {
    "predict": predict,
    "submit": submit,
    "abort an upload": abort_upload,
    "edit a class": edit_class,
    "roll back": roll_back,
    "erase": erase,
    "back up": back_up,
    "kill": kill,
    "fill the disk": fill_disk,
}


def _act(soak: Soak, name: str) -> None:
    rng = random.Random(f"{soak.seed} {name}")
    while not soak.stop.wait(rng.expovariate(1 / PAUSES[name])):
        try:
            ACTORS[name](soak, rng)
        except Exception as error:  # a bug of the actor must not end the soak silently
            soak.failures.append(f"{name}: {error!r}")


# The run


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[bool]:
    """Mount a tmpfs on `folder`; False if this user may not."""
    options = f"size={megabytes}m"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "soak", str(folder)], capture_output=True)
    try:
        yield mounted.returncode == 0
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "--lazy", str(folder)], capture_output=True)


def _openworld(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "openworld", *command], capture_output=True, text=True, timeout=600)


@contextmanager
def openworld_up(data: Path, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, **SETTINGS}
    command = [sys.executable, "-m", "openworld", "up", "--data", str(data), "--port", str(port)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(90)
        process.kill()


def wait_until_ready(soak: Soak, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if soak.up.poll() is not None:
            raise RuntimeError(f"openworld up ended with {soak.up.returncode}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{soak.url}/readyz", timeout=10).status_code == 200:
                return
        time.sleep(0.5)
    raise RuntimeError(f"the server was not ready for {seconds:g} s")


def outcomes(soak: Soak, seconds: float) -> dict[str, str]:
    """Wait for all accepted tasks; returns the state of each, "unknown" if the service lost it."""
    states: dict[str, str] = dict.fromkeys(soak.accepted, "no answer")
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for id in [id for id, state in states.items() if state not in ENDED]:
            with suppress(httpx.TransportError):
                answer = httpx.get(f"{soak.url}/tasks/{id}", timeout=30)
                states[id] = answer.json()["state"] if answer.status_code == 200 else "unknown"
        if all(state in ENDED for state in states.values()):
            break
        time.sleep(1)
    return states


def run(folder: Path, minutes: float, seed: int, megabytes: int, log: Path) -> dict[str, Any]:
    disk, backups = folder / "disk", folder / "backups"
    disk.mkdir()
    backups.mkdir()
    port = free_port()
    with small_disk(disk, megabytes) as small, openworld_up(disk / "data", port, log) as up:
        filler = disk / "filler" if small else None
        soak = Soak(disk / "data", backups, f"http://{HOST}:{port}", up, seed, filler)
        wait_until_ready(soak, 120)
        started = time.monotonic()
        threads = [threading.Thread(target=_act, args=(soak, name), name=name) for name in ACTORS]
        for thread in threads:
            thread.start()
        soak.stop.wait(minutes * 60)
        soak.stop.set()
        for thread in threads:
            thread.join()
        faults_ended = time.monotonic()
        wait_until_ready(soak, 180)
        states = outcomes(soak, SETTLE_SECONDS)
        checked = _openworld("check", "--data", str(soak.data), "--json")
        report = json.loads(checked.stdout) if checked.stdout else {"ok": False, "problems": [checked.stderr]}
        report["data"] = soak.data.name
    lost = {id: state for id, state in states.items() if state not in ENDED}
    return {
        "command": f"python -m benchmarks.soak --minutes {minutes:g} --seed {seed}",
        "machine": machine(),
        "seconds": round(faults_ended - started),
        "seconds_to_settle": round(time.monotonic() - faults_ended),
        "small_disk_mib": megabytes if small else None,
        "actions": dict(sorted(soak.counts.items())),
        "tasks": {"accepted": len(states), **Counter(states.values())},
        "tasks_not_ended": lost,
        "failures": soak.failures,
        "check": report,
        "ok": bool(report["ok"]) and not lost and not soak.failures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file")
    parser.add_argument("--minutes", type=float, default=20.0, help="of random faults (default 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--disk", type=int, default=2048, metavar="MIB", help="size of the small disk (default 2048)")
    parser.add_argument("--log", type=Path, help="keep the log of `openworld up` in this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        report = run(Path(folder), args.minutes, args.seed, args.disk, args.log or Path(folder) / "up.log")
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("ok", "tasks", "failures")} | {"check": report["check"]["ok"]}))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
