"""CSI against short separate transcriptions of the paper's equations in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.inference.evidence import Features
from models.inference.model import Head
from models.inference.rotations import TurnedHeads, turn, with_turned
from models.network.adapted_blocks import tensors_of
from tests.support.tiny_model import (
    SIZE,
    TinyImages,
    class_tasks,
    learn_tasks,
    silent_progress,
    tiny_backbone,
    tiny_learner,
)
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.forward_passes import ForwardPasses, turned_view
from trainer.learning.methods import TaskData
from trainer.learning.methods.csi import CsiObjective, contrastive_loss, rotation_head, shifted

Floats = NDArray[np.float64]


def written_out_loss(g: Floats, labels: list[int], tau: float) -> float:
    """Eq. modsupclr, term by term."""
    z = [row / np.sqrt(row @ row) for row in g]
    total = 0.0
    for x in range(len(z)):
        others = [i for i in range(len(z)) if i != x]
        positives = [i for i in others if labels[i] == labels[x]]
        denominator = sum(np.exp(z[x] @ z[i] / tau) for i in others)
        total += -sum(np.log(np.exp(z[x] @ z[p] / tau) / denominator) for p in positives) / len(positives)
    return total / len(z)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 1000), st.integers(1, 4), st.sampled_from([0.07, 0.5, 1.0]))
def test_the_contrastive_loss_is_that_of_the_equation(seed: int, images: int, tau: float) -> None:
    rng = np.random.default_rng(seed)
    classes = 2
    labels = [
        shifted(y, turns, classes) for y in rng.integers(classes, size=images) for _ in range(2) for turns in range(4)
    ]
    g = rng.normal(size=(8 * images, 5))
    loss = contrastive_loss(torch.tensor(g), torch.tensor(labels), tau)
    assert float(loss) == pytest.approx(written_out_loss(g, labels, tau), rel=1e-9)


def test_a_row_without_a_positive_adds_nothing_to_the_loss() -> None:
    g = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]], dtype=torch.float64)
    loss = contrastive_loss(g, torch.tensor([0, 0, 1]), 0.5)
    z = (g / g.norm(dim=1, keepdim=True)).numpy()
    both = [
        np.log(np.exp(z[x] @ z[1 - x] / 0.5) / sum(np.exp(z[x] @ z[i] / 0.5) for i in range(3) if i != x))
        for x in (0, 1)
    ]
    assert float(loss) == pytest.approx(-sum(both) / 3)


def test_each_turn_of_a_class_is_a_class_of_its_own() -> None:
    data = TaskData(["a/0", "b/0"], [0, 1], 2, [])
    batch = CsiObjective().batch(data, np.array([1, 0]), np.random.default_rng(0), tiny_learner().settings)
    assert len(batch.keys) == 2 * 2 * 4  # two views of two images, four rotations
    of_class: dict[int, set[tuple[str, int]]] = {}
    for key, view, label in zip(*batch, strict=True):
        turns, _ = divmod(view, 8)
        of_class.setdefault(label, set()).add((key, turns))
    assert of_class == {turns * 2 + y: {(key, turns)} for y, key in ((0, "a/0"), (1, "b/0")) for turns in range(4)}
    assert {view % 8 for view in batch.views} == {0, 1}  # the plain image and an augmented one


def test_a_turned_view_has_the_pixels_of_the_view_turned_counter_clockwise() -> None:
    passes, read = ForwardPasses(tiny_backbone()), TinyImages().read
    for view in (0, 1):
        upright = passes._pixels(("a/3", view), read)
        for turns in (1, 2, 3):
            turned = passes._pixels(("a/3", turned_view(view, turns)), read)
            for y, x in ((0, 0), (0, SIZE - 1), (2, 5)):
                place = (y, x)
                for _ in range(turns):  # where the pixel goes, a quarter at a time
                    place = (SIZE - 1 - place[1], place[0])
                assert np.array_equal(turned[:, place[0], place[1]], upright[:, y, x])


def test_turned_images_follow_the_upright_ones_in_a_batch() -> None:
    pixels = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    every = with_turned(pixels)
    assert every.shape == (8, 3, 4, 4)
    for turns in range(4):
        assert np.array_equal(every[2 * turns : 2 * turns + 2], turn(pixels, turns))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_the_logit_of_a_class_is_the_mean_of_its_four_outputs(seed: int, counts: list[int]) -> None:
    """Eq. ensemblelogit: each output of the image that is turned accordingly."""
    rng, d, n = np.random.default_rng(seed), 6, 4
    solved = [
        Head(rng.normal(size=(4 * c, d)).astype(np.float32), rng.normal(size=4 * c).astype(np.float32)) for c in counts
    ]
    z = rng.normal(size=(4, len(counts), n, d)).astype(np.float32)
    heads = [rotation_head(head) for head in solved]
    upright = np.concatenate([head.logits(z[0, k])[:, :-1] for k, head in enumerate(heads)], axis=1)
    found = TurnedHeads([(head.turned_weight, head.turned_bias) for head in heads]).ensemble(upright, z[1:])
    column = 0
    for k, c in enumerate(counts):
        for j in range(c):
            for i in range(n):
                four = [
                    solved[k].weight[deg * c + j].astype(float) @ z[deg, k, i] + solved[k].bias[deg * c + j]
                    for deg in range(4)
                ]
                assert found[i, column] == pytest.approx(sum(four) / 4, abs=1e-5)
            column += 1


def test_a_head_of_csi_has_no_ood() -> None:
    head = rotation_head(Head(np.ones((8, 3), np.float32), np.arange(8, dtype=np.float32)))
    assert head.bias.tolist() == [0, 1, -np.inf]
    assert head.turned_bias is not None
    assert head.turned_bias.tolist() == [[2, 3], [4, 5], [6, 7]]


def test_a_task_of_csi_needs_no_image_of_an_earlier_one() -> None:
    """The network, the head and the statistics of a task are the same, whatever earlier images are kept."""
    learner = tiny_learner(method="hat-csi")
    first, second = class_tasks([2, 2])
    (one,) = learn_tasks(learner, [first])
    with_images = learner.learn(one.model, one.samples, second, Checkpoint(None), silent_progress())
    without = learner.learn(one.model, one.samples.without_missing(()), second, Checkpoint(None), silent_progress())
    for name in ("w1", "b1", "w2", "b2"):
        pair = [getattr(learned.model.tasks[1].adapters, name) for learned in (with_images, without)]
        assert np.array_equal(*pair)
    assert np.array_equal(with_images.model.tasks[1].head.weight, without.model.tasks[1].head.weight)
    assert np.array_equal(with_images.model.tasks[0].head.weight, one.model.tasks[0].head.weight)  # no back-update


@pytest.mark.parametrize("method", ["hat-csi", "sup-csi"])
def test_a_task_recognises_its_classes_with_one_rotation_and_with_four(method: str) -> None:
    """Within tasks: nothing makes the logits of different tasks comparable, which is what +c is for."""
    learner = tiny_learner(method=method, rule="paper", epochs=8, learning_rate=0.02)
    model = learn_tasks(learner, class_tasks([2, 2], images=8))[-1].model
    assert model.rule.weights == {"logit": 1.0}
    assert model.rule.rotations == 4
    keys = [key for own in TinyImages().batch(model.classes, count=5, start=100).values() for key in own]
    z = np.stack(
        [
            [learner.tokens.features(keys, tensors_of(task), view=turned_view(0, turns)) for task in model.tasks]
            for turns in range(4)
        ]
    )
    frozen, true = learner.tokens.frozen(keys), np.repeat(np.arange(4), 5)
    one = model.evidence(Features(z[0], *frozen))
    four = model.evidence(Features(z[0], *frozen, turned=z[1:]))
    assert not np.allclose(one.class_logits, four.class_logits)
    for evidence in (one, four):
        assert not evidence.has_ood
        own_task = model.task_of_class == model.task_of_class[true][:, None]
        within = np.where(own_task, model.rule.log_scores(evidence), -np.inf)
        assert (within.argmax(axis=1) == true).mean() >= 0.9
