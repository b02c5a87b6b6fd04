"""Provisional versions: classes answer in closed form before they are learned, and what is learned stays the same."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from models.inference.model_cache import ModelCache
from models.inference.predictor import Predictor
from models.versions.edits import Edit, publish_edit
from models.versions.manifest import Manifest
from models.versions.store import VersionStore
from openworld.check import check_folder
from tasks.batch import LabelledBatch
from tasks.images import ImageStore, Retention
from tests.support.batches import check_batch
from tests.support.tiny_model import TinyImages, tiny_backbone, tiny_settings
from trainer.context import LearningContext
from trainer.learning import gate
from trainer.learning.progress import Event
from trainer.parent import Parent, Submission
from trainer.provisional import drop_pending
from trainer.publish import Outcome, RefinementDropped, learn_batch

pytestmark = pytest.mark.usefixtures("restore_torch_settings", "tiny")


def batch_of(*names: str, start: int = 0, count: int = 8) -> LabelledBatch:
    rows = [(name, f"{n}.png", TinyImages().read(f"{name}/{n}")) for name in names for n in range(start, start + count)]
    return check_batch(rows)


def stored(data: Path, batch: LabelledBatch) -> LabelledBatch:
    """The batch, as a server has accepted it: with its images in the image store."""
    for image in batch.images:
        ImageStore(data).put(batch.read(image.sha256))
    return batch


def learn(
    data: Path, batch: LabelledBatch, listener: Callable[[Event], None] = lambda event: None, **more: Any
) -> Outcome:
    settings = tiny_settings(**{"gate_accuracy": 1, "gate_auc": 1, **more.pop("settings", {})})
    return learn_batch(data, batch, settings, listener, **{"provisional": True, **more})


class Once:
    """A listener that calls `act` after the first epoch of the new task."""

    def __init__(self, act: Callable[[], object]) -> None:
        self._act, self.done = act, False

    def __call__(self, event: Event) -> None:
        if event.phase.startswith("task") and not self.done:
            self.done = True
            self._act()


def manifests(data: Path) -> list[Manifest]:
    store = VersionStore(data)
    return [store.manifest(n) for n in store.versions()]


def labels(data: Path, version: int, name: str, count: int = 4) -> list[str | None]:
    images = [TinyImages().read(f"{name}/{n}") for n in range(500, 500 + count)]
    return [answer.label for answer in Predictor.open(data, version, "cpu").predict(images)]  # type: ignore[union-attr]


def findings(data: Path) -> list[str]:
    return [f"{one.code} {one.subject}: {one.message}" for one in check_folder(data, None).problems]


def edit(data: Path, *what: str) -> None:
    publish_edit(VersionStore(data), Edit(*what), "operator", "anna")  # type: ignore[arg-type]


def test_new_classes_answer_before_they_are_learned(data: Path) -> None:
    outcome = learn(data, batch_of("plum", "fig"))
    *_, provisional, refined = manifests(data)
    assert outcome.manifest.version == refined.version
    assert (provisional.version, provisional.stage, refined.version, refined.stage) == (4, "provisional", 5, "refined")
    assert [one.task_id for one in provisional.pending] == [refined.task_id]
    assert provisional.tasks == refined.tasks
    assert provisional.class_ids == refined.class_ids
    assert provisional.rule["name"] == "provisional"
    assert refined.pending == []
    for name in ("plum", "fig", "class 0", "class 3"):
        assert labels(data, 4, name).count(name) >= 3
    assert findings(data) == []


def test_a_provisional_version_shares_the_contents_of_the_learned_one(data: Path) -> None:
    learn(data, batch_of("plum"))
    *_, before, provisional, refined = manifests(data)
    assert provisional.files["heads"] == before.files["heads"]
    assert all(provisional.files[f"task.{k}"] == before.files[f"task.{k}"] for k in range(3))
    assert set(provisional.files) - set(before.files) == {"provisional"}
    assert "provisional" not in refined.files


def test_a_server_solves_nothing_again_when_a_pending_task_is_learned(data: Path) -> None:
    learn(data, batch_of("fig"))
    cache = ModelCache(VersionStore(data))
    before, provisional, refined = (cache.load(number).model for number in (3, 4, 5))
    assert (before.pending, bool(provisional.pending), refined.pending) == ((), True, ())
    assert refined.frozen is provisional.frozen  # also while a request holds the version before
    full = ModelCache(VersionStore(data)).load(5).model.frozen
    for name in ("counts", "means", "moments", "scatter", "gram"):
        np.testing.assert_allclose(getattr(refined.frozen, name), getattr(full, name), rtol=1e-3, atol=1e-4)


def test_what_is_learned_does_not_depend_on_the_provisional_version(data: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(data, tmp_path / "other"))
    batch = batch_of("plum", "fig")
    with_it, without = learn(data, batch), learn(other, batch, provisional=False)
    assert (with_it.manifest.version, without.manifest.version) == (5, 4)
    assert with_it.manifest.files == without.manifest.files
    assert with_it.manifest.rule == without.manifest.rule


def test_the_closed_form_equals_statistics_of_all_images(data: Path) -> None:
    learn(data, batch_of("plum"))
    provisional, refined = (Predictor.open(data, n, "cpu").model.frozen for n in (4, 5))
    for name in ("counts", "means", "moments", "scatter", "gram"):
        np.testing.assert_allclose(getattr(provisional, name), getattr(refined, name), rtol=1e-3, atol=1e-4)


def test_the_first_task_answers_before_it_is_learned(tmp_path: Path) -> None:
    data = tmp_path / "new"
    outcome = learn(data, batch_of("plum", "fig", "kiwi"))
    provisional, refined = manifests(data)
    assert (provisional.version, provisional.stage, refined.stage) == (1, "provisional", "refined")
    assert outcome.manifest.version == 2
    assert labels(data, 1, "plum").count("plum") >= 3
    assert findings(data) == []


def test_further_images_of_a_known_class_count_at_once(data: Path) -> None:
    learn(data, batch_of("class 0", start=50))
    *_, provisional, refined = manifests(data)
    assert provisional.stage == "provisional"
    assert provisional.tasks == refined.tasks
    counts = {n: Predictor.open(data, n, "cpu").model.frozen.counts[0] for n in (3, 4, 5)}
    assert counts[4] == counts[5] == counts[3] + 8


def test_a_correction_counts_at_once(data: Path) -> None:
    wrong = check_batch([("class 1", "0.png", TinyImages().read("class 0/0"))])
    learn(data, wrong)
    before, provisional, refined = (Predictor.open(data, n, "cpu").model.frozen.counts for n in (3, 4, 5))
    assert (provisional - before).tolist() == (refined - before).tolist() == [-1, 1, 0, 0, 0]
    assert findings(data) == []


def test_a_task_that_waits_becomes_pending_while_another_one_is_learned(data: Path) -> None:
    first, second = batch_of("plum"), stored(data, batch_of("fig"))
    told: list[tuple[str, int]] = []
    outcome = learn(
        data,
        first,
        waiting=lambda: [Submission(second, "s2", 3)],
        on_provisional=lambda submission, version: told.append((submission.task_id, version)),
    )
    assert told == [(first.task_id, 4), (second.task_id, 5)]
    *_, both, result = manifests(data)
    assert both.tasks[3:] == [["plum"], ["fig"]]
    assert outcome.manifest.version == result.version
    assert (result.stage, result.tasks[3:], result.task_id) == ("provisional", [["plum"], ["fig"]], first.task_id)
    assert [one.task_id for one in result.pending] == [second.task_id]
    store = VersionStore(data)
    assert (store.find_task(first.task_id), store.find_task(second.task_id)) == (6, None)
    assert labels(data, 6, "fig").count("fig") >= 3
    # Its own turn: it is pending already.
    last = learn(data, second, submission="s2", submitted_at=3).manifest
    assert (last.version, last.stage, last.tasks[3:]) == (7, "refined", [["plum"], ["fig"]])
    assert last.class_ids == both.class_ids
    assert findings(data) == []


def test_a_killed_training_resumes_without_another_provisional_version(data: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(data, batch_of("plum"), Once(interrupt))
    assert VersionStore(data).current_manifest().stage == "provisional"  # type: ignore[union-attr]
    assert findings(data) == []
    epochs: list[int] = []
    learn(data, batch_of("plum"), lambda event: epochs.append(event.epoch) if event.phase == "task 4" else None)
    assert epochs == [2]
    assert [manifest.stage for manifest in manifests(data)[3:]] == ["provisional", "refined"]


def test_edits_of_pending_classes_stay(data: Path) -> None:
    def edits() -> None:
        edit(data, "rename", "plum", "prune")
        edit(data, "retire", "fig")

    outcome = learn(data, batch_of("plum", "fig"), Once(edits))
    assert (outcome.manifest.tasks[-1], outcome.manifest.aliases) == (["fig", "prune"], {"fig": None})
    assert set(labels(data, outcome.manifest.version, "fig")) == {None}
    assert findings(data) == []


def test_an_edit_between_a_kill_and_the_next_attempt_stays(data: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(data, batch_of("plum"), Once(interrupt), submitted_at=3)
    edit(data, "rename", "plum", "prune")
    outcome = learn(data, batch_of("plum"), submitted_at=3)
    assert (outcome.manifest.tasks[-1], outcome.manifest.stage) == (["prune"], "refined")


@pytest.mark.parametrize("goal", [3, 1])
def test_a_roll_back_drops_the_refinement(data: Path, goal: int) -> None:
    with pytest.raises(RefinementDropped, match=r"version \d became current"):
        learn(data, batch_of("plum"), Once(lambda: VersionStore(data).activate(goal, "operator", "no plums")))
    assert VersionStore(data).current() == goal
    assert not (data / "work" / batch_of("plum").task_id).exists()
    assert learn(data, batch_of("plum")).state == "published"  # a retry


@contextmanager
def rejecting() -> Iterator[None]:
    """The gate rejects what is learned."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gate, "_reasons", lambda *arguments: ["it forgets too much"])
        yield


def test_a_rejected_refinement_leaves_the_classes_provisional(data: Path) -> None:
    with rejecting():
        outcome = learn(data, batch_of("plum"))
    assert outcome.state == "provisional"
    assert outcome.verdict is not None
    assert outcome.verdict.reasons == ("it forgets too much",)
    assert (outcome.manifest.version, outcome.manifest.stage) == (4, "provisional")
    assert VersionStore(data).find_task(batch_of("plum").task_id) is None
    # The next task is learned beside it.
    later = learn(data, batch_of("fig")).manifest
    assert (later.stage, later.tasks[3:]) == ("provisional", [["fig"], ["plum"]])
    assert findings(data) == []


def test_a_cancelled_task_is_dropped(data: Path) -> None:
    def interrupt(event: Event) -> None:
        if event.phase == "back-updating":  # by then the other task is pending
            raise KeyboardInterrupt

    first, second = batch_of("plum"), stored(data, batch_of("fig"))
    with pytest.raises(KeyboardInterrupt):
        learn(data, first, interrupt, waiting=lambda: [Submission(second)])
    store = VersionStore(data)
    parent, settings = Parent.load(store), tiny_settings()
    context = LearningContext.open(store, settings, tiny_backbone(), parent.manifest)
    drop_pending(context, parent, first.task_id)
    left = manifests(data)[-1]
    assert (left.tasks[3:], [one.task_id for one in left.pending]) == ([["fig"]], [second.task_id])
    assert left.metrics["edit"] == "classes that answered provisionally do not answer any more: plum"
    drop_pending(context, parent, second.task_id)
    last, before = manifests(data)[-1], manifests(data)[2]
    assert (last.stage, last.tasks, last.rule, last.threshold) == (
        "refined",
        before.tasks,
        before.rule,
        before.threshold,
    )
    assert {role: last.files[role] for role in before.files if role != "samples"} == {
        role: entry for role, entry in before.files.items() if role != "samples"
    }
    assert findings(data) == []


def test_images_of_pending_tasks_are_kept(data: Path) -> None:
    with rejecting():
        learn(data, batch_of("plum"))
    retention = Retention(VersionStore(data), dict)
    pending = {image.sha256 for image in batch_of("plum").images}
    assert not pending & {image.sha256 for image in retention.expired(0).removable}
    retention.remove(min(pending), "anna")
    assert learn(data, batch_of("fig")).manifest.stage == "provisional"
    assert min(pending) not in ImageStore(data)


def test_without_an_image_to_calibrate_on_there_is_no_provisional_version(data: Path) -> None:
    batch = batch_of("plum", count=1)
    assert learn(data, batch).manifest.stage == "refined"


def test_the_paper_has_no_provisional_versions(data: Path) -> None:
    outcome = learn(data, batch_of("plum"), settings={"rule": "paper"})
    assert (outcome.manifest.version, outcome.manifest.stage) == (4, "refined")
