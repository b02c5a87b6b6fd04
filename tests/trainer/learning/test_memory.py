import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.inference.frozen import FrozenStatistics
from tasks.errors import BatchError
from tests.support.tiny_model import TinyImages, class_tasks, features_of, learn_tasks, silent_progress, tiny_learner
from trainer.learning.checkpoint import Checkpoint
from trainer.learning.memory import (
    HeldOut,
    Samples,
    check_size,
    corrections,
    limit_held_out,
    merged,
    remember,
    split,
    spread_over_classes,
    unseen,
)
from trainer.learning.progress import Progress

MOST = 10
quick = settings(max_examples=60, deadline=None)
seeds = st.integers(0, 2**32 - 1)
batches = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 15), max_size=6)


def images(counts: dict[str, int], start: int = 0) -> dict[str, list[str]]:
    return {name: [f"{name}/{i}" for i in range(start, start + count)] for name, count in counts.items()}


@quick
@given(seeds, batches, batches, st.integers(6, 60))
def test_every_class_with_enough_images_has_the_same_share_of_the_memory(
    seed: int, first: dict[str, int], second: dict[str, int], size: int
) -> None:
    rng = np.random.default_rng(seed)
    old = remember({}, images(first), [], 100, size, rng)
    new = images(second, start=10)  # a known class repeats some of its images
    memory = remember(old, new, [], 100, size, rng)
    assert set(memory) == set(first) | set(second)
    quota = size // max(len(memory), 1)
    assert sum(map(len, memory.values())) <= size
    for name, keys in memory.items():
        pool = set(old.get(name, ())) | set(new.get(name, ()))
        assert len(keys) == min(quota, len(pool))
        assert set(keys) <= pool
        assert len(set(keys)) == len(keys)
        assert all(key.startswith(f"{name}/") for key in keys)


@quick
@given(seeds, batches, st.integers(12, 60))
def test_old_classes_only_lose_images(seed: int, first: dict[str, int], size: int) -> None:
    rng = np.random.default_rng(seed)
    old = remember({}, images(first), [], 100, size, rng)
    memory = remember(old, images(dict.fromkeys("uvwxyz", 5)), [], 100, size, rng)
    for name, keys in old.items():
        assert [key for key in keys if key in memory[name]] == list(memory[name])


def test_the_memory_is_not_changed_in_place() -> None:
    memory = {"a": ("a/0", "a/1")}
    remember(memory, {"a": ["a/2"], "b": ["b/0"]}, [], 100, 2, np.random.default_rng(0))
    assert memory == {"a": ("a/0", "a/1")}


def test_the_memory_is_a_random_choice_of_images() -> None:
    kept = {
        key
        for seed in range(20)
        for key in remember({}, images({"a": 10}), [], 100, 3, np.random.default_rng(seed))["a"]
    }
    assert kept == set(images({"a": 10})["a"])


def test_more_classes_than_the_memory_holds_are_refused() -> None:
    rng = np.random.default_rng(0)
    assert set(map(len, remember({}, images(dict.fromkeys("abc", 5)), [], 100, 3, rng).values())) == {1}
    with pytest.raises(BatchError, match=r"4 classes do not fit a memory of 3 images: raise .*TRAIN_REPLAY_SIZE"):
        remember(images({"a": 1}), images(dict.fromkeys("bcd", 5)), [], 100, 3, rng)


@quick
@given(seeds, st.dictionaries(st.sampled_from("abc"), st.integers(3, 200), min_size=1), st.floats(0.01, 0.49))
def test_held_out_images_are_never_trained_on(seed: int, counts: dict[str, int], share: float) -> None:
    batch = images(counts)
    alone = {key: number for number, key in enumerate(key for keys in batch.values() for key in keys)}
    train, held_out = split(batch, alone, share, MOST, np.random.default_rng(seed))
    for name, keys in batch.items():
        out = [sample.key for sample in held_out if sample.label == name]
        assert not set(out) & set(train[name])
        assert sorted(out + train[name]) == sorted(keys)
        assert 1 <= len(out) <= MOST
        assert len(out) == min(max(1, round(share * len(keys))), MOST)
        assert train[name]


@quick
@given(
    st.dictionaries(st.text(), st.lists(st.text(), max_size=3).map(tuple), max_size=3),
    st.lists(st.builds(HeldOut, st.text(), st.text()), max_size=3).map(tuple),
    st.dictionaries(st.text(), st.lists(st.text(), max_size=3).map(tuple), max_size=3),
)
def test_samples_are_unchanged_by_json(
    memory: dict[str, tuple[str, ...]], held_out: tuple[HeldOut, ...], seen: dict[str, tuple[str, ...]]
) -> None:
    samples = Samples(memory, held_out, seen)
    assert Samples.from_json(json.loads(json.dumps(samples.to_json()))) == samples
    assert Samples.from_json(samples.to_json()) == samples


def test_samples_name_every_image_that_must_be_kept() -> None:
    assert Samples({"a": ("1", "2"), "b": ()}, (HeldOut("3", "a"), HeldOut("2", "a"))).keys == {"1", "2", "3"}


def test_a_repeated_image_is_not_counted_twice_and_not_trained_on_if_it_is_held_out() -> None:
    learner = tiny_learner(replay_size=100)
    parent = learn_tasks(learner, class_tasks([2]))[0]
    held_out = {sample.key for sample in parent.samples.held_out}
    again = TinyImages().batch(["class 0"], count=16)  # six learned images and ten new ones
    child = learner.learn(parent.model, parent.samples, again, Checkpoint(None), silent_progress())
    memory = [key for keys in child.samples.memory.values() for key in keys]
    assert not held_out & set(memory)
    assert len(memory) == len(set(memory))
    out = [sum(sample.label == name for sample in child.samples.held_out) for name in ("class 0", "class 1")]
    assert child.model.tasks[0].gaussians.counts.tolist() == [16 - out[0], 6 - out[1]]
    assert child.model.frozen.counts.tolist() == [16, 6]


def test_the_limit_of_held_out_images_holds_for_a_class_that_is_extended_repeatedly() -> None:
    learner = tiny_learner(hold_out=0.49, epochs=1)
    model, samples = learner.empty(), Samples()
    for start in (0, 100):
        batch = TinyImages().batch(["a"], count=100, start=start)
        learned = learner.learn(model, samples, batch, Checkpoint(None), silent_progress())
        model, samples = learned.model, learned.samples
    assert len(samples.held_out) == 10  # half of keep_per_class
    assert len(samples.keys) <= 20


def test_a_batch_with_more_classes_than_the_memory_holds_is_refused_before_it_is_trained() -> None:
    learner, phases = tiny_learner(replay_size=1), []
    progress = Progress("task", lambda event: phases.append(event.phase))
    with pytest.raises(BatchError):
        learner.learn(learner.empty(), Samples(), class_tasks([2])[0], Checkpoint(None), progress)
    assert phases == []


@pytest.mark.parametrize("others", [{}, {"class 0": 6}, {"sibling": 3}, {"lone too": 1}])
def test_a_new_class_with_one_image_is_learned(others: dict[str, int]) -> None:
    """Alone, beside a known class, beside a larger new class, beside another one with one image."""
    learner = tiny_learner(epochs=8, sparsity=0)
    parent = learn_tasks(learner, class_tasks([2]))[0]
    images = TinyImages().batch(["lone"], count=1)
    for name, count in others.items():
        images |= TinyImages().batch([name], count=count, start=20)
    child = learner.learn(parent.model, parent.samples, images, Checkpoint(None), silent_progress())
    assert child.samples.memory["lone"] == ("lone/0",)
    assert len(child.model.tasks) == 2
    keys = TinyImages().batch(["lone"], count=20, start=50)["lone"]
    evidence = child.model.evidence(features_of(learner, child.model, keys))
    best = child.model.rule.log_scores(evidence).argmax(axis=1)
    assert np.mean([child.model.classes[c] == "lone" for c in best]) > 0.4  # of four classes at most
    assert np.isfinite(child.model.novelty.threshold).all()


def test_a_first_task_needs_a_class_with_two_images_to_calibrate_on() -> None:
    learner, phases = tiny_learner(), []
    progress = Progress("task", lambda event: phases.append(event.phase))
    with pytest.raises(BatchError, match="no class has two images"):
        learner.learn(learner.empty(), Samples(), TinyImages().batch("ab", count=1), Checkpoint(None), progress)
    assert phases == []
    images = TinyImages().batch(["lone"], count=1) | TinyImages().batch(["sibling"], count=3)
    child = learner.learn(learner.empty(), Samples(), images, Checkpoint(None), progress)
    assert {sample.label for sample in child.samples.held_out} == {"sibling"}


# Unseen images

LEARNED = Samples(seen={"cat": ("c1", "c2"), "dog": ("d1",)})


def test_images_that_were_never_learned_are_unseen() -> None:
    assert unseen({"dog": ["d2", "d1"], "cat": ["c1"], "cow": ["w1"]}, LEARNED) == {"cow": ["w1"], "dog": ["d2"]}
    assert unseen({"cat": ["c1"]}, Samples()) == {"cat": ["c1"]}


def test_a_batch_without_unseen_images_is_refused() -> None:
    with pytest.raises(BatchError, match="every image of this batch is learned already"):
        unseen({"cat": ["c2"], "dog": ["d1"]}, LEARNED)


def test_images_learned_under_another_label_are_unseen_and_have_their_earlier_label() -> None:
    batch = {"cow": ["w1", "c1"], "cat": ["c2"]}
    assert unseen(batch, LEARNED) == {"cow": ["w1", "c1"]}
    assert corrections(batch, LEARNED) == {"c1": "cat"}
    assert LEARNED.without({"c1"}).seen == {"cat": ("c2",), "dog": ("d1",)}


def test_a_batch_that_leaves_a_class_without_images_is_refused() -> None:
    with pytest.raises(BatchError, match="every image of 'dog' gets another label: rename or merge the class instead"):
        corrections({"cat": ["d1"]}, LEARNED)


def test_a_corrected_image_counts_for_its_new_label_only() -> None:
    learner = tiny_learner()
    source = TinyImages()
    tasks = [source.batch(["apple", "pear"], 8), source.batch(["plum"], 8)]
    tasks[0]["apple"] += ["pear/50", "pear/51"]  # one of them is held out or in the memory, or both are
    *_, parent = learn_tasks(learner, tasks)
    more = {"pear": ["pear/50", "pear/51"]}
    child = learner.learn(parent.model, parent.samples, more, Checkpoint(None), silent_progress())
    right = source.batch(["apple", "pear", "plum"], 8)
    right["pear"] += more["pear"]
    keys = [key for own in right.values() for key in own]
    labels = np.repeat(np.arange(3), [len(own) for own in right.values()])
    expected = FrozenStatistics.fit(*learner.tokens.frozen(keys), labels, 3)
    found = child.model.frozen
    assert found.counts.tolist() == [8, 10, 8]
    for name in ("means", "scatter", "moments", "gram"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-6, atol=1e-6)
    samples = child.samples
    assert {name: set(own) for name, own in samples.seen.items()} == {name: set(own) for name, own in right.items()}
    assert not set(samples.memory["apple"]) & set(more["pear"])
    assert {sample.label for sample in samples.held_out if sample.key in more["pear"]} <= {"pear"}
    with pytest.raises(BatchError, match="learned already"):
        learner.learn(child.model, child.samples, more, Checkpoint(None), silent_progress())


def test_merged_adds_images_per_class() -> None:
    grown = merged(LEARNED.seen, {"cow": ["w1"], "cat": ["c3"]})
    assert grown == {"cat": ("c1", "c2", "c3"), "dog": ("d1",), "cow": ("w1",)}
    assert LEARNED.seen == {"cat": ("c1", "c2"), "dog": ("d1",)}


@quick
@given(seeds, st.dictionaries(st.sampled_from("abc"), st.integers(1, 2 * MOST), min_size=1))
def test_held_out_images_are_limited_per_class_and_keep_their_order(seed: int, counts: dict[str, int]) -> None:
    held_out = [HeldOut(key, name) for name, keys in images(counts).items() for key in keys]
    np.random.default_rng(seed).shuffle(held_out)  # type: ignore[arg-type]
    kept = limit_held_out(held_out, MOST, np.random.default_rng(seed))
    for name, count in counts.items():
        assert sum(sample.label == name for sample in kept) == min(count, MOST)
    chosen = {sample.key for sample in kept}
    assert [sample for sample in held_out if sample.key in chosen] == list(kept)
    assert limit_held_out(held_out, MOST, np.random.default_rng(seed)) == kept


def test_a_known_class_in_the_batch_counts_once_for_the_memory() -> None:
    check_size({"a", "b"}, {"b", "c"}, 3)
    with pytest.raises(BatchError, match=r"3 classes do not fit a memory of 2 images: raise .*TRAIN_REPLAY_SIZE"):
        check_size({"a", "b"}, {"b", "c"}, 2)


def test_replay_and_held_out_images_together_fill_the_quota_of_a_class() -> None:
    held_out = [HeldOut(f"out/{i}", "a") for i in range(4)]
    memory = remember({}, images({"a": 50, "b": 50}), held_out, 10, None, np.random.default_rng(0))
    assert {name: len(keys) for name, keys in memory.items()} == {"a": 6, "b": 10}


def test_without_a_total_many_classes_are_not_refused() -> None:
    many = {f"class {c}": [f"class {c}/{i}" for i in range(3)] for c in range(600)}
    check_size({}, many, None)
    assert set(map(len, remember({}, many, [], 20, None, np.random.default_rng(0)).values())) == {3}
    with pytest.raises(BatchError, match="600 classes do not fit a memory of 200 images"):
        check_size({}, many, 200)


def test_images_are_spread_over_classes_and_stay_the_same_as_classes_grow() -> None:
    images = {"cat": ["c", "a", "b"], "dog": ["e", "d"]}
    assert spread_over_classes(images, 2) == {"cat": ["a"], "dog": ["d"]}
    assert spread_over_classes({**images, "owl": ["f"]}, 3) == {"cat": ["a"], "dog": ["d"], "owl": ["f"]}
    assert spread_over_classes(images, 1) == {"cat": ["a"], "dog": ["d"]}  # at least one of each class
    assert spread_over_classes(images, None) == {"cat": ["a", "b", "c"], "dog": ["d", "e"]}
