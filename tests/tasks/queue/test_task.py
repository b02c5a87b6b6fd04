"""The schema of a task."""

import json

from tasks.batch import LabelledBatch, LabelledImage
from tasks.queue.task import MAX_CURVE_POINTS, Task, TaskProgress
from tests.support.redis_servers import make_task


def test_a_task_is_made_from_a_checked_batch() -> None:
    shas = ["1" * 64, "2" * 64, "3" * 64]
    images = [LabelledImage(sha, label, "") for sha, label in zip(shas, ["cat", "cat", "dog"], strict=True)]
    batch = LabelledBatch(tuple(images), read=lambda sha256: b"", duplicates=1)
    task = Task.of(batch, "ann")
    assert (task.id, task.batch_sha256, task.state) == (batch.task_id, batch.sha256, "queued")
    assert task.classes == {"cat": shas[:2], "dog": shas[2:]}
    assert task.duplicates == 1


def test_a_long_curve_is_downsampled_without_values_that_are_not_finite() -> None:
    progress = TaskProgress(
        phase="learning", loss=float("nan"), losses=(float("inf"), *(float(n) for n in range(1001)))
    )
    assert progress.loss is None
    assert len(progress.losses) == MAX_CURVE_POINTS
    assert (progress.losses[0], progress.losses[-1]) == (0, 1000)
    assert sorted(set(progress.losses)) == list(progress.losses)


def test_fields_that_the_next_release_adds_to_a_record_are_ignored() -> None:
    task = make_task("a", progress=TaskProgress(phase="learning", epoch=3))
    record = {
        name: value if isinstance(value, str) else json.dumps(value)
        for name, value in task.model_dump(mode="json").items()
        if value is not None
    }
    newer = json.loads(record["progress"]) | {"of_the_next_release": [1, 2]}
    assert Task.from_record(record | {"progress": json.dumps(newer), "of_the_next_release": "3"}) == task
