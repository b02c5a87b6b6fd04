"""Images of one scene stay on one side of every split, and weigh as much as one image."""

import numpy as np
import pytest
from numpy.typing import NDArray

from trainer.learning.likeness import (
    BLOCK,
    LEAST_GROUPS,
    NEAR_DUPLICATE,
    SCENE,
    assign_folds,
    find_scenes,
    independent_weights,
    likeness_groups,
)
from trainer.learning.memory import split

CLASSES, SCENES, FRAMES = 3, 4, 5


def frames(seed: int = 0) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
    """Features of CLASSES x SCENES scenes with FRAMES nearly equal frames each, their classes and their scenes."""
    rng = np.random.default_rng(seed)
    scene = np.repeat(np.arange(CLASSES * SCENES), FRAMES)
    features = rng.standard_normal((CLASSES * SCENES, 64))[scene] + 0.05 * rng.standard_normal((len(scene), 64))
    order = rng.permutation(len(scene))
    return features[order], (scene // SCENES)[order], scene[order]


def test_frames_of_a_scene_are_one_group_and_scenes_are_not_mixed() -> None:
    features, labels, scenes = frames()
    groups = likeness_groups(features, labels)
    for scene in np.unique(scenes):
        assert len(np.unique(groups[scenes == scene])) == 1
    assert len(np.unique(groups)) == CLASSES * SCENES


@pytest.mark.parametrize("seed", range(5))
def test_frames_of_a_scene_share_a_fold_and_a_side(seed: int) -> None:
    features, labels, scenes = frames(seed)
    groups = likeness_groups(features, labels)
    folds = assign_folds(labels, groups, 3, np.random.default_rng(seed))
    for scene in np.unique(scenes):
        assert len(np.unique(folds[scenes == scene])) == 1
    for label in range(CLASSES):
        assert len(np.unique(folds[labels == label])) > 1  # no fold holds a whole class
    keys = [str(i) for i in range(len(labels))]
    images = {str(c): [keys[i] for i in np.flatnonzero(labels == c)] for c in range(CLASSES)}
    group_of = dict(zip(keys, groups.tolist(), strict=True))
    train, held_out = split(images, group_of, 0.3, 10, np.random.default_rng(seed))
    trained_scenes = {scenes[int(key)] for own in train.values() for key in own}
    assert not trained_scenes & {scenes[int(sample.key)] for sample in held_out}
    assert {sample.label for sample in held_out} == set(images)


def test_frames_of_a_scene_say_as_much_as_one_image_about_fresh_ones() -> None:
    features, labels, _ = frames()
    np.testing.assert_allclose(independent_weights(find_scenes(features, labels)), 1 / FRAMES)
    assert independent_weights(find_scenes(np.ones((10, 8)), np.zeros(10, np.int64))).sum() == pytest.approx(1)
    np.testing.assert_allclose(independent_weights(find_scenes(np.eye(3), np.array([0, 0, 1]))), 1)


def photographs(alike: float, scenes: int, seed: int = 0) -> NDArray[np.float64]:
    """Images of one class: a common part, one of the scene, and one of the image. (scenes * FRAMES, f)

    Images of a scene have a cosine of about `alike`, all others one that is 0.2 smaller.
    """
    rng = np.random.default_rng(seed)
    common, of_scene, of_image = (rng.standard_normal((count, 2000)) for count in (1, scenes, scenes * FRAMES))
    scene = np.repeat(np.arange(scenes), FRAMES)
    return np.sqrt(alike - 0.2) * common + np.sqrt(0.2) * of_scene[scene] + np.sqrt(1 - alike) * of_image


def test_photographs_of_one_place_are_one_scene_although_none_are_near_duplicates() -> None:
    features, labels = photographs(0.82, SCENES), np.zeros(SCENES * FRAMES, np.int64)
    cosines = np.corrcoef(features)
    assert cosines[np.triu_indices(len(cosines), 1)].max() < NEAR_DUPLICATE
    assert likeness_groups(features, labels).tolist() == np.repeat(np.arange(SCENES), FRAMES).tolist()
    np.testing.assert_allclose(independent_weights(find_scenes(features, labels)), 1 / FRAMES)


def test_things_that_all_look_the_same_are_of_different_scenes() -> None:
    """Their deviations from the class mean have nothing in common."""
    features, labels = photographs(0.82, 1), np.zeros(FRAMES, np.int64)
    assert np.corrcoef(features)[0, 1] > SCENE
    np.testing.assert_allclose(independent_weights(find_scenes(features, labels)), 1)


@pytest.mark.parametrize("seed", range(10))
def test_held_out_images_are_of_small_scenes(seed: int) -> None:
    def held_out(scenes: str) -> set[str]:
        """Of ten images of these scenes, of which two should be held out."""
        images = {"class": list("abcdefghij")}
        groups = {key: ord(scene) for key, scene in zip(images["class"], scenes, strict=True)}
        return {sample.key for sample in split(images, groups, 0.2, 10, np.random.default_rng(seed))[1]}

    assert held_out("0000001123") in ({"g", "h"}, {"i", "j"})
    assert held_out("0000000011") == {"i", "j"}
    assert held_out("0000111222") in ({"e", "f", "g"}, {"h", "i", "j"})
    part = held_out("0000001111")  # training needs both
    assert part < set("ghij")
    assert len(part) == 2
    assert held_out("0000000000") == set()


def test_a_class_of_equal_images_can_still_be_split() -> None:
    labels = np.zeros(10, np.int64)
    groups = likeness_groups(np.ones((10, 8)), labels)
    assert len(np.unique(groups)) >= LEAST_GROUPS
    folds = assign_folds(labels, groups, 4, np.random.default_rng(0))
    assert (folds >= 0).all()
    assert len(np.unique(folds)) > 1


def test_the_only_image_of_a_class_is_in_no_fold() -> None:
    labels = np.array([0, 0, 1])
    groups = likeness_groups(np.eye(3), labels)
    folds = assign_folds(labels, groups, 2, np.random.default_rng(0))
    assert folds[2] == -1
    assert sorted(folds[:2].tolist()) == [0, 1]


def test_the_same_images_get_the_same_groups_and_folds() -> None:
    features, labels, _ = frames()
    runs = []
    for _ in range(2):
        groups = likeness_groups(features, labels)
        runs.append((groups.tolist(), assign_folds(labels, groups, 4, np.random.default_rng(7)).tolist()))
    assert runs[0] == runs[1]


def test_one_near_duplicate_in_a_large_class_is_found() -> None:
    rng = np.random.default_rng(0)
    features = rng.standard_normal((2 * BLOCK + 3, 64))
    features[-1] = features[1] + 0.01
    groups = likeness_groups(features, np.zeros(len(features), np.int64))
    assert groups[-1] == groups[1]
    assert len(np.unique(groups)) == len(features) - 1


def test_no_images_have_no_folds() -> None:
    nothing = np.zeros(0, np.int64)
    assert len(assign_folds(nothing, nothing, 3, np.random.default_rng(0))) == 0
