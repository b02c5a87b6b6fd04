"""Draws stand for images of earlier tasks: they have the sums of the images, and are left out like them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch")

from models.errors import KeepError
from models.inference.factors import TaskSums
from models.inference.frozen import FrozenStatistics
from models.inference.model import Model
from tasks.batch import LEAST_SUMMED
from tasks.errors import BatchError
from tests.support.tiny_model import (
    TinyImages,
    class_tasks,
    learn_tasks,
    silent_progress,
    tiny_backbone,
    tiny_cnn,
    tiny_learner,
)
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.draws import are_drawn, check_drawable, drawn_deviations, drawn_expansion, with_draws
from trainer.learning.learner import Learned, Learner
from trainer.learning.leave_out import LeaveOut
from trainer.learning.likeness import likeness_groups
from trainer.learning.memory import Samples, split
from trainer.learning.novelty_fit import spread_as_images
from trainer.learning.provisional import provisional_model
from trainer.learning.simulation import left_out_scores

CLASSES, PER_CLASS, SIZE, EXPANDED = 3, 12, 60, 20


def statistics_learner(**settings: object) -> Learner:
    return tiny_learner(cnn=True, method="hat-csi", keep="statistics", replay_size=None, **settings)


@pytest.fixture(scope="module")
def learned() -> list[Learned]:
    return learn_tasks(statistics_learner(), class_tasks([2, 2], images=12))


def gaussian_images(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Features with a few strong directions, their random features, classes, and the projection."""
    rng = np.random.default_rng(seed)
    labels = np.repeat(np.arange(CLASSES), PER_CLASS)
    strength = np.geomspace(1, 0.05, SIZE)
    x = rng.normal(0, 1, (CLASSES, SIZE))[labels] * 0.3 + rng.normal(0, 1, (len(labels), SIZE)) * strength
    projection = rng.standard_normal((SIZE, EXPANDED)).astype(np.float32)
    return x, np.maximum(x @ projection, 0), labels, projection


def test_draws_have_the_means_and_the_sums_of_the_images() -> None:
    x, h, labels, projection = gaussian_images(0)
    counts = np.bincount(labels)
    statistics = FrozenStatistics.fit(x, h, labels, CLASSES)
    rows, _ = FrozenStatistics.empty(SIZE, EXPANDED).with_classes(CLASSES).scatter_rows(x, labels, 1)
    sums = TaskSums.empty(SIZE, EXPANDED).changed(rows, h, 1)
    drawn = statistics.means[labels] + drawn_deviations(sums.scatter, counts, np.random.default_rng(1))
    expanded = drawn_expansion(drawn, projection, sums.gram, statistics.moments, counts)
    again = FrozenStatistics.fit(drawn, expanded, labels, CLASSES)
    for name in ("counts", "means", "scatter", "moments", "gram"):
        np.testing.assert_allclose(getattr(again, name), getattr(statistics, name), rtol=1e-4, atol=1e-3)
    # None of them is an image.
    assert np.linalg.norm(drawn[:, None] - x, axis=2).min() > 0.1
    # They are left out of the statistics as the images are: recognised no better, and as far away.
    scores = [
        left_out_scores(LeaveOut(statistics, *pair, labels), np.random.default_rng(2))
        for pair in ((x.astype(np.float32), h.astype(np.float32)), (drawn.astype(np.float32), expanded))
    ]
    nearest = [own.distances.min(axis=1) for own in scores]
    assert nearest[1].mean() == pytest.approx(nearest[0].mean(), rel=0.1)
    inside = statistics.scores(drawn.astype(np.float32), expanded.astype(np.float32))
    assert inside.distances.min(axis=1).mean() < 0.8 * nearest[0].mean()  # what draws that stay in would say


def test_the_same_statistics_give_the_same_draws(learned: list[Learned]) -> None:
    model, images = learned[-1].model, [TinyImages().batch(["class 9"])["class 9"][0]]
    drawn = []
    for seed in (0, 0, 1):
        learner = statistics_learner(seed=seed)
        samples = with_draws(learner.tokens, model, Samples(), images, learner.settings)
        keys = sorted(samples.learned_keys)
        assert are_drawn(keys).all()
        drawn.append(learner.tokens.frozen(keys)[0])
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.allclose(drawn[0], drawn[2])


def test_a_version_names_hashes_only_and_no_earlier_image_is_read(learned: list[Learned]) -> None:
    learner = statistics_learner()
    earlier = {key for task in class_tasks([2, 2], images=12) for keys in task.values() for key in keys}
    read = learner.tokens._read

    def read_new(key: str) -> bytes:
        assert key not in earlier, f"image {key} of an earlier task was read"
        return read(key)

    learner.tokens._read = read_new
    batch = TinyImages().batch(["class 4", "class 5"], 12)
    found = learner.learn(learned[-1].model, learned[-1].samples, batch, Checkpoint(None), silent_progress())
    assert found.samples.keys == set()
    assert set(found.samples.memory) == set(found.model.classes)
    assert {key for keys in found.samples.seen.values() for key in keys} == earlier | {
        key for keys in batch.values() for key in keys
    }
    assert found.verdict.accepted
    assert found.verdict.drawn > 0 == learned[0].verdict.drawn
    assert [report.accuracy_before is not None for report in found.verdict.tasks] == [True, True, False]
    assert found.model.rule.rotations == 1
    assert not any(one.image.startswith("drawn") for one in found.verdict.advice.wrong_labels)


def test_networks_count_with_the_papers_rule_only(learned: list[Learned]) -> None:
    task = class_tasks([2, 2], images=12)[1]
    for rule, name in (("fitted", "closed form"), ("paper+c", "paper+c")):
        learner = statistics_learner(rule=rule, networks="if they pay")
        found = learner.learn(learned[0].model, learned[0].samples, task, Checkpoint(None), silent_progress())
        assert found.model.rule.name == name
        assert np.isfinite(found.model.novelty.threshold).all()
    assert len(found.model.rule.scales) == 2


def test_a_provisional_version_is_fitted_on_draws_of_learned_classes(learned: list[Learned]) -> None:
    learner = statistics_learner()
    pending = {"task": TinyImages().batch(["class 4"], 6)}
    made = provisional_model(learner.tokens, learned[-1].model, learned[-1].samples, pending, learner.settings)
    assert made.drawn > 0
    assert made.samples.learned_keys == set()
    assert made.samples.keys == set(pending["task"]["class 4"])


def test_scores_of_draws_are_spread_as_those_of_images() -> None:
    scores, drawn = np.array([-4.0, 0.0, 4.0, 0.9, 1.0, 1.1]), np.array([False] * 3 + [True] * 3)
    spread = spread_as_images(scores, drawn)
    assert np.array_equal(spread[:3], scores[:3])
    np.testing.assert_allclose(spread[3:], [0.6, 1.0, 1.4])  # by at most MOST_SPREAD
    assert np.array_equal(spread_as_images(scores, ~drawn), scores)  # never nearer to each other
    assert np.array_equal(spread_as_images(scores[1:], drawn[1:]), scores[1:])  # two images say nothing


def test_a_class_that_changes_by_few_images_is_refused(learned: list[Learned]) -> None:
    first, samples = learned[-1].model, learned[-1].samples
    source = TinyImages()
    for batch, message in (
        (source.batch(["class 4"], 2), "class 'class 4' gains 2 of at least 5 images"),
        (source.batch(["class 0"], 1, start=50), "class 'class 0' gains 1 of at least 5"),
        ({"class 4": [*source.batch(["class 4"])["class 4"], "class 0/1"]}, "class 'class 0' loses 1 of at least 5"),
    ):
        with pytest.raises(BatchError, match=message):
            statistics_learner().learn(first, samples, batch, Checkpoint(None), silent_progress())


def test_networks_have_statistics_over_three_images_of_a_class_at_least() -> None:
    keys = [f"alike/{number}" for number in range(LEAST_SUMMED)]
    groups = likeness_groups(np.ones((len(keys), 4)), np.zeros(len(keys), np.int64))  # near-duplicates stay together
    for seed in range(5):
        rng = np.random.default_rng(seed)
        train, _ = split({"alike": keys}, dict(zip(keys, groups.tolist(), strict=True)), 0.2, 10, rng)
        assert len(train["alike"]) >= 3


def test_a_corrected_label_leaves_the_statistics_of_the_other_class(learned: list[Learned]) -> None:
    model, samples = learned[-1].model, learned[-1].samples
    moved = {"class 1": [f"class 0/{number}" for number in range(5)]}
    found = statistics_learner().learn(model, samples, moved, Checkpoint(None), silent_progress())
    assert found.model.frozen.counts.tolist() == [7, 17, 12, 12]
    check_sums(found.model)


def check_sums(model: Model) -> None:
    """The parts of the tasks are the sums that draws are made from."""
    scatter = sum(task.sums.scatter.rows.T @ task.sums.scatter.rows for task in model.tasks if task.sums)
    np.testing.assert_allclose(scatter, model.frozen.scatter, atol=1e-4)


def test_a_backbone_with_several_tokens_is_refused() -> None:
    check_drawable(tiny_cnn().spec)
    with pytest.raises(KeepError, match="OPENWORLD_BACKBONE=tf_efficientnet_lite0 in a new data folder"):
        check_drawable(tiny_backbone().spec)
    spec = tiny_cnn().spec
    with pytest.raises(KeepError, match="cannot be drawn"):
        check_drawable(replace(spec, frozen=replace(spec.frozen, transform="signed-sqrt")))
