"""Learning on an object store: from an empty bucket, on one machine after the other."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from models.errors import StaleParent
from models.inference.predictor import Predictor
from models.storage import Storage, open_storage
from models.versions.store import VersionStore
from tests.support.batches import check_batch
from tests.support.object_stores import new_bucket
from tests.support.tiny_model import TinyImages, tiny_settings
from trainer.publish import Outcome, learn_batch

pytestmark = pytest.mark.usefixtures("restore_torch_settings", "tiny", "seaweedfs")

IMAGES = TinyImages()


def learn(storage: Storage, *names: str, submission: str | None = None) -> Outcome:
    batch = check_batch((name, f"{n}.png", IMAGES.read(f"{name}/{n}")) for name in names for n in range(4))
    settings = tiny_settings(gate_accuracy=1, gate_auc=1)
    return learn_batch(storage, batch, settings, lambda event: None, submission=submission)


def test_the_first_task_fills_an_empty_bucket_and_the_next_machine_goes_on(tmp_path: Path) -> None:
    url = new_bucket()
    first = open_storage(tmp_path / "first", url)
    assert learn(first, "plum", "kiwi").state == "published"
    assert {found.key.split("/")[0] for found in first.list("")} == {
        *("CURRENT", "FORMAT", "versions", "promotions", "tasks", "heads", "samples", "graphs", "images"),
    }
    second = open_storage(tmp_path / "second", url)
    assert learn(second, "plum", "kiwi").state == "already learned"
    outcome = learn(second, "fig")
    assert (outcome.state, outcome.place) == ("published", f"{url}/versions/000002.json")
    predictor = Predictor.open(open_storage(tmp_path / "third", url), device="cpu")
    assert (predictor.version, sorted(predictor.model.classes)) == (2, ["fig", "kiwi", "plum"])
    [answer] = predictor.predict([IMAGES.read("plum/50")])
    assert answer.label == "plum"
    assert list(first.list("work/")) == []


def test_a_trainer_that_lost_its_task_reports_the_version_of_the_other_one(tmp_path: Path) -> None:
    """The other one publishes right before, and an operator rolls back: publishing again would bring the task back."""
    url = new_bucket()
    slow, fast = (open_storage(tmp_path / name, url) for name in ("slow", "fast"))
    learn(slow, "plum", "kiwi")
    publish = VersionStore.publish

    def overtaken(self: VersionStore, *arguments: object, **more: object) -> object:
        patch.undo()
        assert learn(fast, "fig", submission="s").manifest.version == 2
        VersionStore(fast).activate(1, "operator", "roll back")
        with pytest.raises(StaleParent):
            publish(self, *arguments, **more)  # type: ignore[arg-type]
        raise StaleParent("overtaken")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VersionStore, "publish", overtaken)
        outcome = learn(slow, "fig", submission="s")
    assert (outcome.state, outcome.manifest.version) == ("already learned", 2)
    assert VersionStore(slow).current() == 1
