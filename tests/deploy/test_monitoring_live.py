"""A real Prometheus watches the real programs: every panel has data, and the alert about novel images comes and goes.

The rules are the real ones with time running sixty times as fast.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from openworld.up.claims import free_port
from tests.support.learning_loop import Loop, batch, loop
from tests.support.prometheus import Query, local_config, queries, requires_prometheus
from tests.support.servers import known_image, novel_image, wait_until

WINDOWS, WAITS = 60, 300  # so many times as fast: five minutes are five seconds, and ten minutes of `for` are two
RATE_INTERVAL = "5s"
NOVEL = 'sum(openworld_predictions_total{outcome="novel"})'
ANSWERED = 'sum(openworld_predictions_total{outcome=~"known|novel"})'


@dataclass
class Prometheus:
    url: str
    since: float = field(default_factory=time.time)

    def _get(self, path: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30, trust_env=False).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, expr: str) -> float:
        ((_, value),) = [series["value"] for series in self._get("query", query=expr)["result"]]
        return float(value)

    def values(self, expr: str) -> list[float]:
        """All that it was since the start, without what is not a number."""
        found = self._get("query_range", query=expr, start=self.since, end=time.time(), step=1)["result"]
        return [number for series in found for _, text in series["values"] if (number := float(text)) == number]

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"}

    def scraped(self) -> bool:
        targets = self._get("targets", state="active")["activeTargets"]
        return len(targets) == 2 and all(target["health"] == "up" for target in targets)


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program is not None
    config = local_config(folder, targets, WINDOWS, WAITS)
    address = f"127.0.0.1:{free_port('127.0.0.1', 0, '')}"
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *options], cwd=folder, stdout=log, stderr=log)
    try:
        running = Prometheus(f"http://{address}")
        wait_until(lambda: answers(f"{running.url}/-/ready"), 30)
        yield running
    finally:
        process.terminate()
        process.wait(30)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Robot:
    """Sends pictures one after the other, and counts what it is told."""

    def __init__(self, url: str) -> None:
        self.told: Counter[str] = Counter()
        self._url, self._novel, self._stop = url, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Robot:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def see(self, *, novel: bool) -> None:
        (self._novel.set if novel else self._novel.clear)()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        usual = [known_image(f"class {label}", 100 + number) for number in range(8) for label in range(5)]
        strange = [novel_image(number) for number in range(40)]
        with httpx.Client(base_url=self._url, timeout=30, trust_env=False) as http:
            for turn in range(1_000_000):
                if self._stop.wait(0.02):
                    return
                pictures = strange if self._novel.is_set() else usual
                response = http.post("/predict", content=pictures[turn % 40])
                if response.status_code != 200:
                    self.told[str(response.status_code)] += 1
                    continue
                (answer,) = response.json()["predictions"]
                self.told["novel" if answer["novel"] else "known"] += 1


@dataclass(frozen=True)
class Day:
    """What was seen of one day of a robot's life, played fast."""

    prometheus: Prometheus
    told: Counter[str]
    firing_by_day: set[str]  # while everything was known
    firing_at_noon: set[str]  # after something new had come
    firing_at_night: set[str]  # after it was learned
    versions: tuple[int, int]


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    root = tmp_path_factory.mktemp("monitoring")
    port = free_port("127.0.0.1", 0, "")
    with loop(root, metrics_port=str(port), drift_window="200", threads="1") as running:
        running.settings["SLOW"] = (
            "0.3"  # seconds that every step of learning takes longer, to be seen while it goes on
        )
        trainer = running.start("train")
        running.start("serve")
        wait_until(lambda: trainer.poll() is None and answers(f"http://127.0.0.1:{port}/metrics"), 60)
        targets = {"server:8000": running.url.removeprefix("http://"), "trainer:8001": f"127.0.0.1:{port}"}
        with prometheus(root / "prometheus", targets) as watching, Robot(running.url) as robot:
            yield play(running, watching, robot)


def play(running: Loop, watching: Prometheus, robot: Robot) -> Day:
    alert = "OpenworldOodRateHigh"
    wait_until(watching.scraped, 30)
    wait_until(lambda: robot.told.total() > 100, 30)
    time.sleep(5)  # the whole window is of known pictures
    by_day = watching.firing()
    robot.see(novel=True)
    wait_until(lambda: alert in watching.firing(), 40)
    at_noon = watching.firing()
    before = httpx.get(f"{running.url}/readyz").json()["version"]
    task = running.submit(batch("something new", "something else")).json()["id"]
    assert running.wait_until_ended(task)["state"] == "published"
    robot.see(novel=False)
    wait_until(lambda: httpx.get(f"{running.url}/readyz").json()["version"] > before, 20)
    wait_until(lambda: alert not in watching.firing(), 40)
    at_night = watching.firing()
    time.sleep(4)  # enough scores of the new version, and scrapes of them
    robot.stop()
    total = robot.told.total()
    wait_until(lambda: watching.value(ANSWERED) >= total, 10)
    after = httpx.get(f"{running.url}/readyz").json()["version"]
    return Day(watching, robot.told, by_day, at_noon, at_night, (before, after))


@requires_prometheus
def test_the_ood_rate_is_exactly_the_share_of_novel_answers_that_the_client_counted(day: Day) -> None:
    assert set(day.told) == {"known", "novel"}, "every request was answered, the swap included"
    assert day.prometheus.value(NOVEL) == day.told["novel"]
    assert day.prometheus.value(f"{NOVEL} / {ANSWERED}") == day.told["novel"] / day.told.total()


@requires_prometheus
def test_the_alert_fires_while_most_images_are_novel_and_only_then(day: Day) -> None:
    assert day.firing_by_day == set(), "nothing is wrong on a usual day"
    assert "OpenworldOodRateHigh" in day.firing_at_noon
    assert "OpenworldOodRateHigh" not in day.firing_at_night
    rates = day.prometheus.values("job:openworld_ood:ratio_rate5m")
    assert min(rates) < 0.3
    assert max(rates) > 0.7
    assert day.firing_at_noon | day.firing_at_night <= {"OpenworldOodRateHigh", "OpenworldScoreDrift"}


@requires_prometheus
def test_a_task_is_seen_getting_older_while_it_is_learned(day: Day) -> None:
    """Not only between two tasks: else nobody would notice a trainer that hangs in one."""
    assert max(day.prometheus.values("openworld_task_age_seconds")) > 1
    assert max(day.prometheus.values('openworld_task_queue_depth{state="learning"}')) == 1
    assert any(0 < progress < 1 for progress in day.prometheus.values("openworld_train_progress"))
    assert day.prometheus.value("openworld_task_age_seconds") == 0


@requires_prometheus
def test_the_swap_is_seen(day: Day) -> None:
    before, after = day.versions
    assert after == before + 1
    assert day.prometheus.value("sum(increase(openworld_model_swaps_total[5m]))") > 0
    seen = [f'openworld_predictions_total{{version="{version}"}}' for version in day.versions]
    assert all(day.prometheus.values(series) for series in seen)


@requires_prometheus
@pytest.mark.parametrize("question", list(queries()), ids=lambda question: question.where)
def test_every_panel_has_something_to_show(day: Day, question: Query) -> None:
    assert day.prometheus.values(question.rendered(RATE_INTERVAL))
