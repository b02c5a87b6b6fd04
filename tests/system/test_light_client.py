"""The `client` extra installs no numerical library, and is enough to call a server."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.support.fresh_venv import clean_environment, install
from tests.support.servers import known_image, learned_folder, running_server

ABSENT = ("numpy", "PIL", "onnxruntime", "torch", "fastapi", "redis")
CALL = f"""
import importlib.util, json, sys
from pathlib import Path
from service.client import Client

found = [name for name in {ABSENT} if importlib.util.find_spec(name)]
with Client(sys.argv[1]) as openworld:
    answer = openworld.predict(Path(sys.argv[2]))
    print(json.dumps({{"found": found, "label": answer.label, "serving": openworld.versions().serving}}))
"""


@pytest.mark.timeout(600)
def test_the_client_extra_alone_is_enough_to_call_a_server(tmp_path: Path) -> None:
    bin_folder, installed = install(tmp_path, "client")
    assert not installed & {"numpy", "pillow", "onnxruntime", "onnxruntime-gpu", "safetensors", "fastapi", "redis"}
    image = tmp_path / "image"
    image.write_bytes(known_image("class 0"))

    with running_server(learned_folder(tmp_path / "robot")) as server:
        command = [bin_folder / "python", "-c", CALL, server.url, image]
        called = subprocess.run(
            command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=60, check=False
        )

    assert called.returncode == 0, called.stderr
    assert json.loads(called.stdout) == {"found": [], "label": "class 0", "serving": 3}

    command_line = subprocess.run(
        [bin_folder / "openworld", "versions"], cwd=tmp_path, env=clean_environment(), capture_output=True, text=True
    )
    assert command_line.returncode == 2
    assert command_line.stderr.startswith("error: the command openworld needs '")
    assert "pip install 'openworld[all]'" in command_line.stderr
    assert "Traceback" not in command_line.stderr
