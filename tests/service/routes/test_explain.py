"""POST /explain: its numbers are those of the model's own functions, and it stands in nobody's way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.images import ImageLimits
from models.inference.answer import answer
from models.inference.predictor import Predictor
from models.inference.rules import log_class_probabilities, log_coefficient
from models.versions.edits import Edit, publish_edit
from models.versions.store import VersionStore
from service.errors import DeadlinePassed
from service.inference.servable import EmptyModel
from service.routes import explain as module
from service.routes.explain import Explainer, explain
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


@pytest.mark.parametrize("image", IMAGES, ids=["task 1", "task 3", "a stranger"])
def test_the_numbers_are_those_of_the_models_own_functions(predictor: Predictor, image: bytes) -> None:
    told = explain(predictor, predictor.decode(image))
    model = predictor.model
    evidence = model.evidence(predictor.runtime.features(model, predictor.decode(image)[None]))
    scores = model.rule.log_scores(evidence)[0]
    classes = [one for task in told.tasks for one in task.classes]
    assert [one.name for one in classes] == list(model.classes)
    assert [one.score for one in classes] == scores.tolist()
    assert [one.frozen_distance for one in classes] == evidence.frozen[0].tolist()
    known_by = model.calibration.p_known(evidence)[0]
    for k, task in enumerate(told.tasks):
        probabilities = np.exp(log_class_probabilities(evidence.logits[k], model.rule.constants))[0]
        assert [one.probability for one in task.classes] == probabilities.tolist()
        assert [one.distance for one in task.classes] == evidence.distances[k][0].tolist()
        assert task.coefficient == float(np.exp(log_coefficient(evidence.distances[k]))[0, 0])
        assert task.coefficient == pytest.approx(1 / min(one.distance for one in task.classes))
        assert task.p_ood + sum(one.probability for one in task.classes) == pytest.approx(1)
        assert task.p_known == known_by[k]
    answered = answer(model, evidence)[0]
    assert (told.label, told.novel, told.score) == (answered.label, answered.novel, max(scores))
    assert (told.calibrated_score, told.p_novel) == (answered.calibrated_score, answered.p_novel)
    assert told.threshold == float(model.calibration.threshold[0])
    assert told.novel == (told.score < told.threshold)
    assert (told.rule, told.constants) == (model.rule.name, model.rule.constants)


@pytest.mark.parametrize("image", IMAGES, ids=["task 1", "task 3", "a stranger"])
def test_the_server_explains_what_it_answers(server: RunningServer, predictor: Predictor, image: bytes) -> None:
    prediction = server.post("/predict", content=image).json()["predictions"][0]
    told = server.post("/explain", content=image).json()
    shared = ("label", "novel", "score", "calibrated_score", "p_novel", "version")
    assert {name: told[name] for name in shared} == {name: prediction[name] for name in shared}
    own = explain(predictor, predictor.decode(image))
    here = Explanation.model_validate(told)
    assert (here.rule, here.constants, here.threshold) == (own.rule, own.constants, own.threshold)
    for task, other in zip(here.tasks, own.tasks, strict=True):
        assert [one.score for one in task.classes] == pytest.approx([one.score for one in other.classes])


def test_another_version_can_be_asked(server: RunningServer) -> None:
    told = server.post("/explain?version=1", content=known_image("class 4")).json()
    assert (told["version"], len(told["tasks"]), told["novel"]) == (1, 1, True)
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


def test_one_image_at_a_time(server: RunningServer) -> None:
    two = [("images", known_image("class 0")), ("images", known_image("class 1"))]
    assert server.post("/explain", files=two).json()["code"] == "body_too_large"
    assert server.post("/explain", files=two[:1]).status_code == 200


def test_it_is_no_prediction(server: RunningServer) -> None:
    before = server.get("/pulse").json()["known"]
    server.post("/explain", content=known_image("class 0"))
    assert server.get("/pulse").json()["known"] == before


def test_merged_and_retired_classes_are_shown_as_what_they_are_answered_as(tmp_path: Path) -> None:
    data = learned_folder(tmp_path / "robot")
    publish_edit(VersionStore(data), Edit("merge", "class 0", "class 1"), "operator", "anna")
    publish_edit(VersionStore(data), Edit("retire", "class 2"), "operator", "anna")
    predictor = Predictor.open(data, device="cpu", threads=1)
    told = explain(predictor, predictor.decode(known_image("class 0")))
    labels = {one.name: one.label for task in told.tasks for one in task.classes}
    assert labels == {
        "class 0": "class 1",
        "class 1": "class 1",
        "class 2": None,
        "class 3": "class 3",
        "class 4": "class 4",
    }
    assert told.label == "class 1"


def test_while_nothing_is_learned_there_is_nothing_to_explain(tmp_path: Path) -> None:
    with running_server(tmp_path / "robot", threads=1) as server:
        told = server.post("/explain", content=known_image("class 0")).json()
        assert (told["version"], told["novel"], told["tasks"], told["threshold"]) == (0, True, [], None)
        assert server.post("/explain", content=b"text").json()["code"] == "unsupported_image"


def test_only_those_who_may_predict_are_told(tmp_path: Path) -> None:
    keys = "a:predict:aaaaaaaa-secret-of-a-robot,b:label+operate:bbbbbbbb-secret-of-people"
    with running_server(tmp_path / "robot", threads=1, keys=keys) as server:
        codes = [
            server.post("/explain", content=known_image("class 0"), headers={"X-API-Key": secret}).status_code
            for secret in ("aaaaaaaa-secret-of-a-robot", "bbbbbbbb-secret-of-people", "nobody")
        ]
        assert codes == [200, 403, 401]


# One at a time, and never on the event loop


class Slow:
    """In the place of `explain`: takes a moment, and remembers how many were at it at once."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.inside, self.most, self.done = seconds, 0, 0, 0

    def __call__(self, *arguments: Any) -> Explanation:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(self.seconds)
        self.inside -= 1
        self.done += 1
        return explain(EmptyModel(ImageLimits()), np.zeros(0, np.float32))


def a_service(timeout: float) -> Any:
    return SimpleNamespace(settings=SimpleNamespace(request_timeout=timeout), decoders=ThreadPoolExecutor(2))


def test_explanations_take_turns_and_the_event_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(0.05)
    monkeypatch.setattr(module, "explain", slow)

    async def several() -> float:
        explainer, service, nothing = Explainer(), a_service(10), EmptyModel(ImageLimits())
        work = asyncio.gather(*(explainer.explain(service, nothing, known_image("class 0")) for _ in range(6)))
        longest = 0.0
        while not work.done():
            before = time.monotonic()
            await asyncio.sleep(0)
            longest = max(longest, time.monotonic() - before)
        await work
        return longest

    longest = asyncio.run(several())
    assert (slow.most, slow.done) == (1, 6)
    assert longest < 0.05


def test_who_waits_too_long_is_sent_away_and_the_place_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(0.3)
    monkeypatch.setattr(module, "explain", slow)

    async def several() -> list[Any]:
        explainer, service, nothing = Explainer(), a_service(0.1), EmptyModel(ImageLimits())
        first = await asyncio.gather(
            *(explainer.explain(service, nothing, known_image("class 0")) for _ in range(3)), return_exceptions=True
        )
        return [*first, await explainer.explain(service, nothing, known_image("class 0"))]

    results = asyncio.run(several())
    assert [isinstance(one, DeadlinePassed) for one in results] == [False, True, True, False]
    assert slow.most == 1
