"""Children that die with their parent, also when that is killed with SIGKILL. On Linux; elsewhere they live on."""

import os
import sys
from collections.abc import Sequence

# Run by a Python of its own, which then becomes the child: code between fork and exec (`preexec_fn`) may deadlock
# where there are threads. The signal is set before looking at the parent, as the parent may die in between.
_LAUNCHER = """\
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(sys.argv[1]):
    sys.exit("the parent is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""


def mortal(command: Sequence[str]) -> list[str]:
    """To be started by a thread that lives as long as the child may: Linux means the *thread* that dies."""
    if sys.platform != "linux":
        return list(command)
    return [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *command]
