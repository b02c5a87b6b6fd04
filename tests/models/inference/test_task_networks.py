"""One call of the graph `selected` gives the features of each chosen pair of image and task."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest

from models.inference import runtime as module
from models.inference.model import Model
from models.inference.providers import open_session
from models.inference.runtime import SELECTED, Runtime
from models.inference.task_networks import SelectedGraph, run_bound
from tests.support.exported import TOLERANCE, Exported, Floats, random_pixels, random_task
from tests.support.tiny_model import bare_model

CHOSEN = np.array([[True, False, True], [False, True, False], [True, True, False], [False, False, True]])


def model_of(exported: Exported) -> Model:
    tasks = tuple(random_task(exported.backbone, units, seed) for seed, units in enumerate((3, 9, 5)))
    return replace(bare_model([]), tasks=tasks)


def one_by_one(exported: Exported, model: Model, tokens: Floats) -> Floats:
    every = np.stack([exported.runtime.task_features(tokens, task) for task in model.tasks])
    return np.where(CHOSEN.T[:, :, None], every, 0)


def test_the_graph_gives_the_features_of_each_pair(small: Exported) -> None:
    model, tokens = model_of(small), small.runtime.tokens(random_pixels(small.backbone, len(CHOSEN)))
    graph = SelectedGraph(open_session(small.graphs[SELECTED], "cpu", 1), "cpu")
    found = graph.features(tokens, model.stacked_networks, CHOSEN)
    np.testing.assert_allclose(found, one_by_one(small, model, tokens), atol=TOLERANCE)


class Sent(SelectedGraph):
    """Counts the arrays that are copied to the device."""

    copies = 0

    def _resident(self, networks: object) -> dict[str, onnxruntime.OrtValue]:
        known = networks in self._on_device
        found = super()._resident(networks)  # type: ignore[arg-type]
        self.copies += 0 if known else len(found)
        return found


def test_bound_inputs_give_the_same_and_are_copied_to_the_device_once(small: Exported) -> None:
    """As on a GPU, with the CPU as the device: the tokens are an OrtValue, and the tasks stay where they are."""
    model, pixels = model_of(small), random_pixels(small.backbone, len(CHOSEN))
    trunk = open_session(small.graphs["trunk"], "cpu", 1)
    (tokens,) = run_bound(trunk, "cpu", ["tokens"], {}, {"pixels": pixels}, keep=True)
    assert isinstance(tokens, onnxruntime.OrtValue)
    graph = Sent(open_session(small.graphs[SELECTED], "cpu", 1), "cpu")
    for _ in range(2):
        found = graph.features(tokens, model.stacked_networks, CHOSEN)
        np.testing.assert_allclose(found, one_by_one(small, model, tokens.numpy()), atol=TOLERANCE)
    assert graph.copies == 6
    assert len(graph._on_device) == 1
    del model
    assert len(graph._on_device) == 0


@pytest.mark.parametrize(("providers", "selected"), [(["CPUExecutionProvider"], 0), (["CUDAExecutionProvider"], 1)])
def test_the_graph_is_opened_on_a_gpu_only(
    providers: list[str], selected: int, small: Exported, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[object] = []

    def open_fake(graph: object, device: str, threads: int) -> SimpleNamespace:
        opened.append(graph)
        return SimpleNamespace(get_providers=lambda: providers)

    monkeypatch.setattr(module, "open_session", open_fake)
    runtime = Runtime(small.graphs, "auto", threads=1)
    assert opened.count(small.graphs[SELECTED]) == selected
    assert runtime.device == ("cuda" if selected else "cpu")
