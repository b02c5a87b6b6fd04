"""A virtual environment per peer under build/peers, separate from ours."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"
STAMP = "installed.txt"
INSTALL_SECONDS = 900
# The event loop and parser of our server; all peers are faster with them, but not all require them.
FAST_HTTP = ("uvloop", "httptools")
REQUIREMENTS = {
    "litserve": ("litserve", *FAST_HTTP, "--editable", str(ROOT)),
    "bentoml": ("bentoml", *FAST_HTTP, "--editable", str(ROOT)),
    "litserve-torch": ("litserve", *FAST_HTTP),
    "bentoml-torch": ("bentoml", *FAST_HTTP),
}
OURS = "openworld-environment.pth"  # torch takes 5 GB: the last two find that of this environment
ASK_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""


class PeerUnavailable(Exception):
    """The peer cannot be measured on this machine."""


def install(name: str) -> Path:
    """Create the peer's environment if needed, with this project in it; return its Python."""
    folder = PEERS / name
    python = folder / "bin" / "python"
    wanted = " ".join(REQUIREMENTS[name])
    stamp = folder / STAMP
    if stamp.is_file() and stamp.read_text() == wanted and python.exists():
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in ([sys.executable, "-m", "venv", str(folder)], [*pip, *REQUIREMENTS[name]]):
        _run(command)
    if name.endswith("-torch"):
        (packages,) = (folder / "lib").glob("python*/site-packages")
        (packages / OURS).write_text(f"{sysconfig.get_path('purelib')}\n{ROOT}\n")
    stamp.write_text(wanted)  # written last, so that an incomplete environment is completed
    return python


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(str(error)) from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise PeerUnavailable(f"{' '.join(command[1:4])} failed: {' '.join(lines[-3:]) or done.returncode}")


def versions(python: Path | str, packages: Sequence[str]) -> dict[str, str]:
    """The installed versions of `packages`."""
    command = [str(python), "-c", ASK_VERSIONS, *packages]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found
