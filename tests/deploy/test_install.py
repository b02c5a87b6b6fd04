"""`make run` and `make test` install what each needs, from the package index that pip is configured with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

CONFIGURED = """\
:env:.cert='/etc/ssl/own.pem'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.index-url='https://mirror.example/simple'
install.find-links='/opt/wheels'
"""
# A Python whose pip prints a configuration and installs a uv that prints what it is given.
PYTHON = """\
#!/bin/sh
case "$*" in
    "-m pip config list") cat "$(dirname "$0")/configuration" ;;
    "-m pip install"*" uv")
        printf '#!/bin/sh\\necho "uv $*"\\nenv | grep -E "^(UV_|SSL_CERT_FILE)"\\n' > "$(dirname "$0")/uv"
        chmod +x "$(dirname "$0")/uv" ;;
    *) exit 1 ;;
esac
"""


def install(folder: Path, configuration: str, **environment: str) -> dict[str, str]:
    """Variables that uv is called with, and under "uv" its arguments."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin" / "configuration").write_text(configuration)
    (folder / "bin" / "python").write_text(PYTHON)
    (folder / "bin" / "python").chmod(0o755)
    done = subprocess.run(
        ["sh", str(ROOT / "deploy" / "install.sh"), str(folder), "all"],
        env={"PATH": "/usr/bin:/bin", **environment},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    said, called, *variables = done.stdout.splitlines()
    assert said == f"installing openworld[all] into {folder}"
    return {"uv": called, **dict(variable.split("=", 1) for variable in variables)}


def test_uv_is_installed_once_and_shows_its_progress(tmp_path: Path) -> None:
    first = install(tmp_path, "")
    assert first["uv"] == f"uv pip install --compile-bytecode --python {tmp_path}/bin/python --editable .[all]"
    (tmp_path / "bin" / "uv").write_text((tmp_path / "bin" / "uv").read_text().replace("uv ", "the same uv "))
    assert install(tmp_path, "")["uv"].startswith("the same uv pip install")


def test_what_pip_is_configured_with_is_passed_on(tmp_path: Path) -> None:
    assert {name: value for name, value in install(tmp_path, CONFIGURED).items() if name != "uv"} == {
        "SSL_CERT_FILE": "/etc/ssl/own.pem",
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_FIND_LINKS": "/opt/wheels",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


def test_without_a_configuration_uv_uses_its_own_defaults(tmp_path: Path) -> None:
    assert set(install(tmp_path, "")) == {"uv", "UV_INDEX_STRATEGY"}


def test_variables_of_uv_take_precedence(tmp_path: Path) -> None:
    own = {"UV_DEFAULT_INDEX": "https://own.example/simple", "UV_INDEX_STRATEGY": "first-index"}
    assert own.items() <= install(tmp_path, CONFIGURED, **own).items()


@pytest.mark.parametrize(
    ("target", "extra"), [("run", "all"), ("demo", "demo"), ("lint", "dev"), ("types", "dev"), ("test", "dev")]
)
def test_a_target_installs_only_what_it_needs(target: str, extra: str, tmp_path: Path) -> None:
    command = ["make", "--dry-run", target, f"VENV={tmp_path}/venv"]
    plan = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert plan.count("deploy/install.sh") == 1
    assert f"deploy/install.sh {tmp_path}/venv {extra}\n" in plan


def test_nothing_is_installed_twice_unless_the_dependencies_change(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pip").touch()
    (tmp_path / ".installed-all").touch()
    command = ["make", "--dry-run", "run", f"VENV={tmp_path}"]
    assert "install.sh" not in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    changed = [*command, "--what-if", "pyproject.toml"]
    assert "install.sh" in subprocess.run(changed, cwd=ROOT, capture_output=True, text=True, check=True).stdout
