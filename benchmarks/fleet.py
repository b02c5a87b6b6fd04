"""`python -m benchmarks.fleet --json OUT`: faults in the fleet of `make fleet`, under load through its balancer.

20 swaps (renamed classes), 5 roll backs, a server killed, the active trainer killed in the middle of a task, the Redis
primary killed during 20 submissions, the object store killed and started again while tasks are learned. Afterwards:

    requests   predictions that were neither answered nor refused with 429: none
    tasks      accepted tasks that were lost or learned twice: none
    agreement  seconds from the last fault until all servers serve a version that was made after it: at most 5
    check      `openworld check` finds nothing wrong

Exit code 1 otherwise. Everything is on loopback, with the offline default backbone; a few minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2 as httpx

from benchmarks.machine import machine
from benchmarks.serving.figures import percentile
from benchmarks.serving.made_images import make_image
from deploy.fleet.fleet import Fleet, serving
from deploy.fleet.programs import FleetError, wait_for

SETTINGS = {
    "OPENWORLD_BACKBONE": "tf_efficientnet_lite0",
    "OPENWORLD_TRAIN_EPOCHS": "2",
    "OPENWORLD_TRAIN_LEASE_SECONDS": "5",
    "OPENWORLD_TRAIN_PROVISIONAL": "off",  # a task makes one version
    "OPENWORLD_LOG_FORMAT": "json",
}
CLIENTS, PAUSE = 4, 0.1  # clients that predict, and seconds between the requests of one
SWAPS, ROLL_BACKS, SUBMISSIONS, KILLED_AFTER = 20, 5, 20, 7
AGREEMENT_SECONDS = 5.0
DOWN_SECONDS = 2.0  # for which a killed server or store is away
SETTLE_SECONDS = 240.0  # for the tasks that wait when the faults end
ENDED = ("published", "rejected", "failed", "cancelled")
JPEG = {"Content-Type": "image/jpeg"}


class Load:
    """Clients that predict through the balancer and never repeat a request."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[str] = Counter()
        self.failures: list[str] = []
        self.seconds: list[float] = []
        self._url, self._stop, self._lock = url, threading.Event(), threading.Lock()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(CLIENTS)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        images = [make_image(f"kind {kind}", 1000 + number) for kind in range(4)]
        with httpx.Client(base_url=self._url, timeout=30, trust_env=False) as client:
            for count in range(10**6):
                if self._stop.wait(PAUSE):
                    return
                started = time.perf_counter()
                try:
                    status = str(client.post("/predict", content=images[count % 4], headers=JPEG).status_code)
                except httpx.TransportError as error:
                    status = type(error).__name__
                with self._lock:
                    self.answers[status] += 1
                    self.seconds.append(time.perf_counter() - started)
                    if status not in ("200", "429"):
                        self.failures.append(f"{datetime.now(UTC):%H:%M:%S} {status}")


class Faults:
    """The faults, in the order in which they happen."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.accepted: list[str] = []
        self.refused: Counter[str] = Counter()  # submissions, by error code; they are repeated
        self.seconds: dict[str, float] = {}
        self.swap_seconds: list[float] = []
        self._http = httpx.Client(base_url=fleet.url, timeout=60, trust_env=False)

    def run(self) -> None:
        self._step("first task", self.learn_first)
        self._step("swaps", self.swap)
        self._step("roll backs", self.roll_back)
        self._step("server killed", self.kill_server)
        self._step("trainer killed", self.kill_trainer)
        self._step("Redis primary killed", self.kill_primary)
        self._step("object store restarted", self.restart_store)
        self._step("agreement", lambda: self.rename("kind 1", "kind 1 after the faults"))
        self._step("rest of the tasks", lambda: self.wait_until_ended(self.accepted))
        self.wait_until_all_agree()

    def _step(self, name: str, step: Callable[[], object]) -> None:
        print(f"{datetime.now(UTC):%H:%M:%S} {name}", flush=True)
        started = time.monotonic()
        step()
        self.seconds[name] = round(time.monotonic() - started, 2)

    def learn_first(self) -> None:
        self.wait_until_ended([self.submit(0)])
        self.wait_until_all_agree()

    def swap(self) -> None:
        name = "kind 0"
        for number in range(SWAPS):
            started = time.monotonic()
            renamed = f"kind 0, name {number}"
            self.rename(name, renamed)
            name = renamed
            self.swap_seconds.append(round(time.monotonic() - started, 3))

    def rename(self, name: str, renamed: str) -> None:
        """Make a version without training, and wait until all servers serve it, or a later one."""
        before = self.versions()["current"]
        change = {"rename": renamed}
        # 404: an earlier request renamed it, and its answer was lost.
        wait_for("a renamed class", lambda: self._http.patch(f"/classes/{name}", json=change).status_code in (200, 404))
        wait_for("a new version", lambda: min(serving(server) or 0 for server in self.fleet.servers) > before)
        self.wait_until_all_agree()

    def roll_back(self) -> None:
        for _ in range(ROLL_BACKS):
            target = self.versions()["current"] - 1
            self._http.post(f"/versions/{target}/activate", json={"reason": "benchmark"}).raise_for_status()
            self.wait_until_all_agree()

    def kill_server(self) -> None:
        killed = self.fleet.servers[0]
        self.fleet.kill(killed)
        time.sleep(DOWN_SECONDS)
        self.fleet.start_member(killed)
        self.fleet.wait_until_ready(killed)

    def kill_trainer(self) -> None:
        """Kill the trainer once it has finished an epoch; the standby takes the task over when the lease ends."""
        task = self.submit(1)
        wait_for("the first epoch", lambda: (self.task(task)["progress"] or {}).get("epoch", 0) >= 1)
        active = self.fleet.active_trainer()
        if active is None:
            raise FleetError("no trainer has the lease of the task: it ended before the kill")
        self.fleet.kill(active)
        self.wait_until_ended([task])
        self.fleet.start_member(active)

    def kill_primary(self) -> None:
        for number in range(SUBMISSIONS):
            if number == KILLED_AFTER:
                self.fleet.redis.kill_primary()
            self.submit(2 + number)
        self.fleet.redis.restart_killed()

    def restart_store(self) -> None:
        self.fleet.store.kill()
        time.sleep(DOWN_SECONDS)
        self.fleet.store.start()

    def submit(self, number: int) -> str:
        """Submit a task until it is accepted, always with the same key."""
        name = f"kind {number}"
        names = [name, "kind 1000"] if number == 0 else [name]
        files = [(one, (f"{n}.jpg", make_image(one, n))) for one in names for n in range(6)]
        end = time.monotonic() + SETTLE_SECONDS
        while time.monotonic() < end:
            answer = self._http.post("/tasks", files=files, headers={"Idempotency-Key": name})
            if answer.status_code == 202:
                self.accepted.append(str(answer.json()["id"]))
                return self.accepted[-1]
            is_json = "json" in answer.headers["content-type"]
            self.refused[str(answer.json()["code"] if is_json else answer.status_code)] += 1
            time.sleep(0.5)
        raise FleetError(f"task {number} is not accepted after {SETTLE_SECONDS:g} s: {dict(self.refused)}")

    def task(self, id: str) -> dict[str, Any]:
        answer = self._http.get(f"/tasks/{id}")
        return dict(answer.json()) if answer.status_code == 200 else {"state": "unknown", "progress": None}

    def versions(self) -> dict[str, Any]:
        return dict(self._http.get("/versions").raise_for_status().json())

    def wait_until_ended(self, tasks: Sequence[str]) -> None:
        end = time.monotonic() + SETTLE_SECONDS
        while any(self.task(id)["state"] not in ENDED for id in tasks) and time.monotonic() < end:
            time.sleep(0.5)

    def wait_until_all_agree(self) -> None:
        def agree() -> bool:
            answer = self._http.get("/versions")
            return answer.status_code == 200 and {answer.json()["current"]} == set(map(serving, self.fleet.servers))

        wait_for("one version on all servers", agree)

    def results(self) -> dict[str, Any]:
        """What became of the accepted tasks."""
        learned = Counter(one["task_id"] for one in self.versions()["versions"] if one["task_id"])
        states = {id: self.task(id)["state"] for id in self.accepted}
        ended = {id for id, state in states.items() if state in ENDED and (learned[id] or state != "published")}
        return {
            "accepted": len(self.accepted),
            "states": dict(Counter(states.values())),
            "lost": len(states.keys() - ended),
            "learned twice": sum(learned[id] > 1 for id in states),
            "refused and repeated": dict(self.refused),
        }


def measure(folder: Path) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("OPENWORLD_")}
    with Fleet(folder, environment=kept | SETTINGS) as fleet:
        fleet.start()
        faults = Faults(fleet)
        with Load(fleet.url) as load:
            faults.run()
        command = [sys.executable, "-m", "openworld", "check", "--json", "--data", str(folder / "check")]
        (folder / "check").mkdir()
        check = subprocess.run(command, env=fleet.environment, capture_output=True, text=True)
        tasks = faults.results()
    ok = not load.failures and not tasks["lost"] and not tasks["learned twice"] and check.returncode == 0
    return {
        "ok": ok and faults.seconds["agreement"] <= AGREEMENT_SECONDS,
        "command": "python -m benchmarks.fleet --json OUT",
        "machine": machine(),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "requests": {
            "answers": dict(load.answers),
            "failed": load.failures,
            "p50 seconds": round(percentile(load.seconds, 0.5), 3),
            "p99 seconds": round(percentile(load.seconds, 0.99), 3),
        },
        "tasks": tasks,
        "seconds of each step": faults.seconds,
        "seconds of each swap, on all servers": faults.swap_seconds,
        "seconds until all servers agree": faults.seconds["agreement"],
        "check": {"exit code": check.returncode, "report": json.loads(check.stdout) if check.stdout else check.stderr},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="report file")
    parser.add_argument("--folder", type=Path, help="new folder that keeps data and logs (default: temporary)")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="fleet-") as temporary:
        report = measure((options.folder or Path(temporary) / "fleet").absolute())
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({name: report[name] for name in ("ok", "requests", "tasks", "seconds until all servers agree")}))
    return 0 if report["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
