"""POST /explain: its numbers are the model's, and it does not delay other requests."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from starlette.requests import Request
from starlette.types import Message

from models.images import ImageLimits
from models.inference.answer import answer
from models.inference.evidence import log_coefficients
from models.inference.predictor import Predictor
from models.inference.rules import term
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from service.errors import DeadlinePassed
from service.http.auth import ANONYMOUS
from service.http.limits import Admission, Quota, RateLimiter, RequestLimits
from service.inference.engine import Engine
from service.inference.metrics import Metrics
from service.inference.servable import EmptyModel, ServableModel
from service.routes import explain as module
from service.routes.explain import explain, explain_in_turn
from service.wire.predictions import Explanation
from tests.support.images import make_image
from tests.support.servers import RunningServer, known_image, learned_folder, novel_image, running_server


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return learned_folder(tmp_path_factory.mktemp("explain") / "robot")


@pytest.fixture(scope="module")
def server(data: Path) -> Iterator[RunningServer]:
    with running_server(data, threads=1, max_image_pixels=100_000, max_image_bytes=100_000) as running:
        yield running


@pytest.fixture(scope="module")
def predictor(data: Path) -> Predictor:
    return Predictor.open(data, device="cpu", threads=1)


IMAGES = [known_image("class 0"), known_image("class 4"), novel_image(3)]


@pytest.mark.parametrize("image", IMAGES, ids=["task 1", "task 3", "novel"])
def test_the_numbers_are_those_of_the_models_functions(predictor: Predictor, image: bytes) -> None:
    explained = explain(predictor, predictor.decode(image))
    model = predictor.model
    evidence = model.evidence(predictor.runtime.features(model, predictor.decode(image)[None]))
    scores = model.rule.log_scores(evidence)[0]
    classes = [one for task in explained.tasks for one in task.classes]
    assert [one.name for one in classes] == list(model.classes)
    assert [one.score for one in classes] == scores.tolist()
    assert [one.frozen_distance for one in classes] == evidence.frozen.distances[0].tolist()
    assert [one.frozen_cosine for one in classes] == evidence.frozen.cosines[0].tolist()
    assert [one.output_cosine for one in classes] == evidence.frozen.output_cosines[0].tolist()
    assert [one.ridge for one in classes] == evidence.frozen.ridge[0].tolist()
    # The probabilities are those that the rule weighs, with its output calibration.
    probabilities = np.exp(term(evidence, "probability", model.rule.scales))[0]
    assert [one.probability for one in classes] == pytest.approx(probabilities.tolist())
    for k, task in enumerate(explained.tasks):
        assert [one.distance for one in task.classes] == evidence.distances[k][0].tolist()
        assert task.coefficient == float(np.exp(log_coefficients(evidence))[0, k])
        assert task.coefficient == pytest.approx(1 / min(one.distance for one in task.classes))
        assert task.p_ood + sum(one.probability for one in task.classes) == pytest.approx(1)
    answered = answer(model, evidence)[0]
    assert (explained.label, explained.novel, explained.score) == (answered.label, answered.novel, answered.score)
    assert (explained.calibrated_score, explained.p_novel) == (answered.calibrated_score, answered.p_novel)
    assert explained.threshold == float(model.novelty.threshold[0])
    assert explained.novel_above == model.novelty.novel_above
    assert explained.novel == (explained.score < explained.threshold) == (explained.p_novel > explained.novel_above)
    assert (explained.rule, explained.weights) == (model.rule.name, model.rule.weights)


@pytest.mark.parametrize("image", IMAGES, ids=["task 1", "task 3", "novel"])
def test_the_explanation_agrees_with_the_prediction(server: RunningServer, predictor: Predictor, image: bytes) -> None:
    prediction = server.post("/predict", content=image).json()["predictions"][0]
    explained = server.post("/explain", content=image).json()
    shared = ("label", "novel", "certainty", "score", "calibrated_score", "p_novel", "version")
    assert {name: explained[name] for name in shared} == {name: prediction[name] for name in shared}
    own = explain(predictor, predictor.decode(image))
    here = Explanation.model_validate(explained)
    assert (here.rule, here.weights, here.threshold) == (own.rule, own.weights, own.threshold)
    for task, other in zip(here.tasks, own.tasks, strict=True):
        assert [one.score for one in task.classes] == pytest.approx([one.score for one in other.classes])


def test_another_version_can_explain(server: RunningServer) -> None:
    explained = server.post("/explain?version=1", content=known_image("class 2")).json()
    assert (explained["version"], len(explained["tasks"]), explained["novel"]) == (1, 1, True)
    assert server.post("/explain?version=99", content=known_image("class 4")).json()["code"] == "not_found"


BAD = {
    "nothing": b"",
    "text": b"no image at all",
    "cut short": known_image("class 0")[:60],
    "too many pixels": make_image(1, (400, 400)),
    "too many bytes": make_image(1, (300, 300), "PNG"),
}


@pytest.mark.parametrize("image", BAD.values(), ids=BAD)
def test_a_bad_image_gets_the_code_that_predict_gives_it(server: RunningServer, image: bytes) -> None:
    one, other = server.post("/predict", content=image), server.post("/explain", content=image)
    assert other.status_code >= 400
    assert (one.status_code, one.json()["code"]) == (other.status_code, other.json()["code"])


def test_a_request_has_one_image(server: RunningServer) -> None:
    two = [("images", known_image("class 0")), ("images", known_image("class 1"))]
    assert server.post("/explain", files=two).json()["code"] == "body_too_large"
    assert server.post("/explain", files=two[:1]).status_code == 200


def test_an_explanation_is_not_counted_as_a_prediction(server: RunningServer) -> None:
    before = server.get("/pulse").json()["known"]
    server.post("/explain", content=known_image("class 0"))
    assert server.get("/pulse").json()["known"] == before


def test_merged_and_retired_classes_have_the_label_they_are_answered_as(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    publish_edit(VersionStore(data), Edit("merge", "class 0", "class 1"), "operator", "anna")
    publish_edit(VersionStore(data), Edit("retire", "class 2"), "operator", "anna")
    predictor = Predictor.open(data, device="cpu", threads=1)
    explained = explain(predictor, predictor.decode(known_image("class 0")))
    labels = {one.name: one.label for task in explained.tasks for one in task.classes}
    assert labels == {
        "class 0": "class 1",
        "class 1": "class 1",
        "class 2": None,
        "class 3": "class 3",
        "class 4": "class 4",
    }
    assert explained.label == "class 1"


def test_without_a_learned_version_the_explanation_is_empty(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server:
        explained = server.post("/explain", content=known_image("class 0")).json()
        assert (explained["version"], explained["novel"], explained["tasks"], explained["threshold"]) == (
            0,
            True,
            [],
            None,
        )
        assert server.post("/explain", content=b"text").json()["code"] == "unsupported_image"


def test_an_explanation_needs_the_role_predict(tmp_path: Path) -> None:
    keys = "a:predict:aaaaaaaa-secret-of-a-robot,b:label+operate:bbbbbbbb-secret-of-people"
    with running_server(tmp_path / "robot", threads=1, keys=keys) as server:
        codes = [
            server.post("/explain", content=known_image("class 0"), headers={"X-API-Key": secret}).status_code
            for secret in ("aaaaaaaa-secret-of-a-robot", "bbbbbbbb-secret-of-people", "unknown")
        ]
        assert codes == [200, 403, 401]


# Deadlines, turns and the event loop


class GatedExplain:
    """Replaces `explain`: waits until it may finish, and counts the calls that run at the same time."""

    def __init__(self) -> None:
        self.entered, self.may_finish = threading.Event(), threading.Event()
        self.running, self.most_running, self.done = 0, 0, 0

    def __call__(self, *arguments: Any) -> Explanation:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.entered.set()
        assert self.may_finish.wait(60)
        self.running -= 1
        self.done += 1
        return explain(EmptyModel(ImageLimits()), np.zeros(0, np.float32))


async def until_entered(gated: GatedExplain) -> None:
    """Return while an explanation runs: the event loop is free, or this never happens."""
    while not gated.entered.is_set():
        await asyncio.sleep(0.005)


def fake_container(timeout: float = 10, **parts: Any) -> Any:
    """What the route needs of a container."""
    return SimpleNamespace(
        engine=Engine(1, Metrics(), decode_threads=2),
        explain_turn=asyncio.Semaphore(1),
        explain_thread=ThreadPoolExecutor(1),
        request_limits=RequestLimits(10**6, 1, 10**6, timeout, timeout),
        admission=Admission(Quota(4, 10**6), Quota(4, 10**6), lambda: 0.1),
        rate_limiter=RateLimiter(0, 1),
        **parts,
    )


def explain_one(container: Any, timeout: float | None = None) -> Coroutine[Any, Any, Explanation]:
    return explain_in_turn(
        container, "robot", EmptyModel(ImageLimits()), IMAGES[0], deadline=container.request_limits.deadline(timeout)
    )


def test_explanations_take_turns_and_do_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = GatedExplain()
    monkeypatch.setattr(module, "explain", gated)

    async def several() -> None:
        container = fake_container(timeout=60)
        work = asyncio.gather(*(explain_one(container) for _ in range(6)))
        await until_entered(gated)
        assert gated.done == 0
        gated.may_finish.set()
        await work

    asyncio.run(several())
    assert (gated.most_running, gated.done) == (1, 6)


def test_a_request_that_waits_too_long_fails_and_the_turn_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    gated = GatedExplain()
    monkeypatch.setattr(module, "explain", gated)

    async def several() -> list[Any]:
        container = fake_container(timeout=60)
        first = asyncio.create_task(explain_one(container))
        await until_entered(gated)
        late = await asyncio.gather(*(explain_one(container, 0.2) for _ in range(2)), return_exceptions=True)
        gated.may_finish.set()
        return [await first, *late, await explain_one(container)]

    results = asyncio.run(several())
    assert [isinstance(one, DeadlinePassed) for one in results] == [False, True, True, False]
    assert gated.most_running == 1


def test_the_deadline_covers_loading_a_version() -> None:
    class SlowVersions:
        async def get(self, number: int | None) -> ServableModel:
            await asyncio.Event().wait()
            raise AssertionError("never set")

    async def receive() -> Message:
        return {"type": "http.request", "body": known_image("class 0")}

    async def explain_version() -> None:
        container = fake_container(active_version=SlowVersions())
        request = Request({"type": "http", "headers": []}, receive)
        with pytest.raises(DeadlinePassed):
            await asyncio.wait_for(module.explain_image(request, container, ANONYMOUS, version=1, timeout=0.1), 60)
        assert container.admission.in_use.images == 0

    asyncio.run(explain_version())


def test_a_request_may_set_its_deadline(server: RunningServer) -> None:
    late = server.post("/explain", content=known_image("class 0"), headers={"X-Request-Timeout": "0.000001"})
    assert (late.status_code, late.json()["code"]) == (504, "deadline_passed")
