"""The commands that use a running service, and no data folder."""

from __future__ import annotations

import pytest

from openworld.cli import main


@pytest.mark.parametrize("command", [["teach", "fruit"], ["demo"]])
def test_a_data_folder_is_refused_because_it_names_no_service(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--data", "robot"])
    assert ended.value.code == 2
    assert "give its address with --url" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    assert "--data" not in capsys.readouterr().out
