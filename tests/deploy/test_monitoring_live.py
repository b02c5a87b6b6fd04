"""Prometheus scrapes a running server and trainer: every panel has data, and the alert on novel images fires and ends.

The rules are the real ones with shorter durations.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2 as httpx
import pytest

from tests.support.learning_loop import Loop, batch, loop
from tests.support.ports import free_port
from tests.support.prometheus import Prometheus, Query, local_config, queries, requires_prometheus
from tests.support.servers import known_image, novel_image, wait_until

WINDOW_FACTOR, FOR_FACTOR = 60, 300  # five minutes of a window become 5 s, ten minutes of `for` become 2 s
RATE_INTERVAL = "5s"
NOVEL = 'sum(openworld_predictions_total{outcome="novel"})'
ANSWERED = 'sum(openworld_predictions_total{outcome=~"known|novel"})'


@contextmanager
def prometheus(folder: Path, targets: dict[str, str]) -> Iterator[Prometheus]:
    program = shutil.which("prometheus")
    assert program is not None
    config = local_config(folder, targets, WINDOW_FACTOR, FOR_FACTOR)
    address = f"127.0.0.1:{free_port()}"
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}", f"--web.listen-address={address}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([program, *options], cwd=folder, stdout=log, stderr=log)
    try:
        running = Prometheus(f"http://{address}")
        wait_until(lambda: responds(f"{running.url}/-/ready"), 30)
        yield running
    finally:
        process.terminate()
        process.wait(30)


def responds(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


class Client:
    """A client that sends images one after the other and counts the answers."""

    def __init__(self, url: str) -> None:
        self.answers: Counter[str] = Counter()
        self._url, self._novel, self._stop = url, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Client:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def send(self, *, novel: bool) -> None:
        (self._novel.set if novel else self._novel.clear)()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # Many different ones: the scores of few repeated images differ from the reference by chance.
        known = [known_image(f"class {label}", 100 + number) for number in range(40) for label in range(5)]
        novel = [novel_image(number) for number in range(40)]
        with httpx.Client(base_url=self._url, timeout=30, trust_env=False) as http:
            for turn in range(1_000_000):
                if self._stop.wait(0.02):
                    return
                images = novel if self._novel.is_set() else known
                response = http.post("/predict", content=images[turn % len(images)])
                if response.status_code != 200:
                    self.answers[str(response.status_code)] += 1
                    continue
                (answer,) = response.json()["predictions"]
                self.answers["novel" if answer["novel"] else "known"] += 1


@dataclass(frozen=True)
class Run:
    """What Prometheus and the client saw: known images, then novel images, then a new version."""

    prometheus: Prometheus
    answers: Counter[str]
    firing_while_known: set[str]
    firing_while_novel: set[str]
    firing_after_learning: set[str]
    versions: tuple[int, int]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    root = tmp_path_factory.mktemp("monitoring")
    port = free_port()
    with loop(root, metrics_port=str(port), drift_window="200", threads="1") as running:
        running.settings["SLOW"] = "0.3"  # seconds added to each step of learning, so that scrapes see its progress
        trainer = running.start("train")
        running.start("serve")
        wait_until(lambda: trainer.poll() is None and responds(f"http://127.0.0.1:{port}/metrics"), 60)
        targets = {"server:8000": running.url.removeprefix("http://"), "trainer:8001": f"127.0.0.1:{port}"}
        with prometheus(root / "prometheus", targets) as monitor, Client(running.url) as client:
            yield observe(running, monitor, client)


def observe(running: Loop, monitor: Prometheus, client: Client) -> Run:
    alert = "OpenworldOodRateHigh"
    wait_until(monitor.scraped, 30)
    wait_until(lambda: client.answers.total() > 100, 30)
    time.sleep(5)  # the window contains only known images
    while_known = monitor.firing()
    client.send(novel=True)
    wait_until(lambda: alert in monitor.firing(), 40)
    while_novel = monitor.firing()
    before = httpx.get(f"{running.url}/readyz", timeout=30).json()["version"]
    task = running.submit(batch("something new", "something else")).json()["id"]
    assert running.wait_until_ended(task)["state"] == "published"
    client.send(novel=False)
    wait_until(lambda: httpx.get(f"{running.url}/readyz", timeout=30).json()["version"] > before, 20)
    wait_until(lambda: alert not in monitor.firing(), 40)
    after_learning = monitor.firing()
    time.sleep(4)  # for enough scores of the new version, and scrapes of them
    client.stop()
    total = client.answers.total()
    wait_until(lambda: monitor.value(ANSWERED) >= total, 10)
    after = httpx.get(f"{running.url}/readyz", timeout=30).json()["version"]
    return Run(monitor, client.answers, while_known, while_novel, after_learning, (before, after))


@requires_prometheus
def test_the_ood_rate_equals_the_share_of_novel_answers_that_the_client_counted(run: Run) -> None:
    assert set(run.answers) == {"known", "novel"}, "every request was answered, also during the swap"
    assert run.prometheus.value(NOVEL) == run.answers["novel"]
    assert run.prometheus.value(f"{NOVEL} / {ANSWERED}") == run.answers["novel"] / run.answers.total()


@requires_prometheus
def test_the_alert_fires_only_while_most_images_are_novel(run: Run) -> None:
    # The reference of the scores is 27 images of six scenes: by chance it differs from that of fresh images.
    assert run.firing_while_known <= {"OpenworldScoreDrift"}, "no alert of novelty fires while all images are known"
    assert "OpenworldOodRateHigh" in run.firing_while_novel
    assert "OpenworldOodRateHigh" not in run.firing_after_learning
    rates = run.prometheus.values("job:openworld_ood:ratio_rate5m")
    assert min(rates) < 0.3
    assert max(rates) > 0.7
    assert run.firing_while_novel | run.firing_after_learning <= {"OpenworldOodRateHigh", "OpenworldScoreDrift"}


@requires_prometheus
def test_age_and_progress_of_a_task_are_updated_while_it_is_learned(run: Run) -> None:
    """Without these updates a trainer that hangs in a task would go unnoticed."""
    assert max(run.prometheus.values("openworld_task_age_seconds")) > 1
    assert max(run.prometheus.values('openworld_task_queue_depth{state="learning"}')) == 1
    assert any(0 < progress < 1 for progress in run.prometheus.values("openworld_train_progress"))
    assert run.prometheus.value("openworld_task_age_seconds") == 0


@requires_prometheus
def test_the_swap_is_counted(run: Run) -> None:
    before, after = run.versions
    assert after == before + 1
    assert run.prometheus.value("sum(increase(openworld_model_swaps_total[5m]))") > 0
    seen = [f'openworld_predictions_total{{version="{version}"}}' for version in run.versions]
    assert all(run.prometheus.values(series) for series in seen)


@requires_prometheus
@pytest.mark.parametrize("query", [q for q in queries() if not q.of_object_store], ids=lambda query: query.where)
def test_every_panel_has_data(run: Run, query: Query) -> None:
    """Those of the object store: tests/system/test_fleet.py."""
    assert run.prometheus.values(query.rendered(RATE_INTERVAL))
