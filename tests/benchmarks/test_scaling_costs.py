"""What a swap asks of an object store, as `docs/scaling.md` states it."""

from pathlib import Path

from benchmarks.scaling.costs import swap_costs
from tests.support.servers import learned_folder


def test_a_swap_to_the_next_version_reads_its_own_objects_and_lists_nothing(tmp_path: Path) -> None:
    found = swap_costs(learned_folder(tmp_path / "robot"), tmp_path)
    own = ("CURRENT", "versions", "heads", "tasks", "samples")
    assert found["swap"]["requests"] == {f"get {name}": 1 for name in own}
    assert 0 < found["swap"]["bytes"] < found["first"]["bytes"]
