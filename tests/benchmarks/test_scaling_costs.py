"""What a swap reads, as `docs/scaling.md` states it."""

from pathlib import Path

from benchmarks.scaling.costs import swap_costs
from tests.support.servers import learned_folder


def test_a_swap_to_the_next_version_reads_its_own_files_and_lists_nothing(tmp_path: Path) -> None:
    found = swap_costs(learned_folder(tmp_path / "robot"))
    assert found["reads"].keys() == {"CURRENT", "versions", "tasks", "heads", "samples"}
    assert found["reads"]["CURRENT"] == found["reads"]["tasks"] == found["reads"]["heads"] == 1
    assert sum(found["reads"].values()) <= 7
    assert found["bytes"] > 0
