"""`make system` installs missing tools where it may, starts no service, and never fails."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SCRIPT = ROOT / "tests" / "support" / "install_tools.sh"
HELP = "sudo apt-get update && sudo apt-get install -y --no-install-recommends"
APT = """\
echo "$@" >> {calls}
case " $* " in *" install "*) ;; *) exit 0 ;; esac
sh "$POLICY_RC_D" && echo "a service may start" >> {calls}
{then}
"""


class Machine:
    """A PATH with these commands and an apt-get that records its calls."""

    def __init__(self, folder: Path, user: int, apt: str | None, *commands: str) -> None:
        self.bin, self.calls, self.policy = folder / "bin", folder / "calls", folder / "policy-rc.d"
        self.bin.mkdir()
        for name in ("sh", "tail", "rm", "chmod", "touch", "cp"):
            found = shutil.which(name)
            assert found is not None
            (self.bin / name).symlink_to(found)
        self.add("id", f"echo {user}")
        for name in commands:
            self.add(name, "")
        if apt is not None:
            self.add("apt-get", APT.format(calls=self.calls, then=apt))

    def add(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)

    def run(self) -> str:
        done = subprocess.run(
            ["/bin/sh", str(SCRIPT)],
            env={"PATH": str(self.bin), "POLICY_RC_D": str(self.policy), "SBIN": str(self.bin)},
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        assert done.returncode == 0, "`make test` must continue without the tools"
        assert done.stderr == ""
        return done.stdout

    def installed(self) -> list[str]:
        """Return the packages of each call, and anything else that was recorded."""
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line.rpartition("--no-install-recommends ")[2] for line in lines if not line.endswith(" update")]


OTHERS = ("redis-server", "redis-sentinel", "buildah", "mmdebstrap")
TOOLS = ("chromium", "prometheus", "promtool", "nginx", *OTHERS)
PACKAGES = " ".join(name for name in TOOLS if name != "promtool")
WORKS = f'for name in {" ".join(TOOLS)}; do cp "{{bin}}/id" "{{bin}}/$name"; done'


def test_nothing_happens_when_all_tools_are_installed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, "", *TOOLS)
    assert machine.run() == ""
    assert not machine.calls.exists()


def test_missing_tools_are_installed_once_and_no_service_starts(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, WORKS.format(bin=tmp_path / "bin"))
    assert machine.run() == f"installing for the tests: {PACKAGES} \n"
    assert machine.installed() == [PACKAGES]
    assert not machine.policy.exists(), "services may start again"
    assert machine.run() == ""
    assert machine.installed() == [PACKAGES]


def test_only_missing_tools_are_installed_and_an_existing_policy_stays(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, WORKS.format(bin=tmp_path / "bin"), "chromium", "prometheus", "nginx", *OTHERS)
    machine.policy.write_text("#!/bin/sh\nexit 101\n")
    machine.run()
    assert machine.installed() == ["prometheus"]
    assert machine.policy.exists()


def test_a_failure_prints_its_cause_and_the_command_to_run(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 0, "echo 'E: no network' >&2; exit 100", "chromium", "nginx", *OTHERS)
    out = machine.run()
    assert "E: no network\n" in out
    assert out.endswith(f"{HELP} prometheus\n")
    assert not machine.policy.exists()


@pytest.mark.parametrize(("user", "apt"), [(1000, ""), (0, None)], ids=["no rights", "no apt-get"])
def test_without_the_right_to_install_it_prints_the_command_to_run(tmp_path: Path, user: int, apt: str | None) -> None:
    machine = Machine(tmp_path, user, apt)
    assert machine.run().splitlines()[-1].strip() == f"{HELP} {PACKAGES}"
    assert not machine.calls.exists()


def test_make_test_installs_the_tools_first() -> None:
    plan = subprocess.run(["make", "--dry-run", "test"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert 0 <= plan.find("tests/support/install_tools.sh") < plan.find("/pytest")
