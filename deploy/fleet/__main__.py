"""`python -m deploy.fleet`: start a fleet on this machine, run the demo through its balancer, and wait for Ctrl-C."""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from deploy.fleet.fleet import Fleet
from deploy.fleet.programs import FleetError

EPILOG = """\
The parts: SeaweedFS as the object store; a Redis primary, two replicas and three sentinels; three servers behind nginx;
two trainers, of which one learns and the other waits; Prometheus. All listen on loopback, without keys. Every server
and trainer has an empty folder and one thread. Nothing stays after Ctrl-C, unless --folder names a place for it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m deploy.fleet", description=__doc__, epilog=EPILOG)
    parser.add_argument("--port", type=int, default=8000, help="port of the balancer (default: 8000)")
    parser.add_argument("--folder", type=Path, help="new folder for data and logs (default: temporary)")
    parser.add_argument("--no-demo", action="store_true", help="do not run `openworld demo`")
    parser.add_argument("--once", action="store_true", help="end after the demo instead of waiting for Ctrl-C")
    options = parser.parse_args(arguments)
    if options.folder is not None and options.folder.exists():
        parser.error(f"{options.folder} exists: name a new folder")
    # Both end everything. A shell starts programs in the background with SIGINT ignored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="fleet-") as temporary:
            return run(options.folder or Path(temporary) / "fleet", options.port, not options.no_demo, options.once)
    except KeyboardInterrupt:
        print("\nstopped", flush=True)
        return 0
    except FleetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def run(folder: Path, port: int, demo: bool, once: bool) -> int:
    with Fleet(folder, port) as fleet:
        print("starting the object store and Redis with sentinels", flush=True)
        fleet.start_services()
        print("starting servers, trainers, nginx and Prometheus", flush=True)
        fleet.start_programs()
        show(fleet)
        if demo:
            command = [sys.executable, "-m", "openworld", "demo", "--url", fleet.url]
            if code := subprocess.run(command, env=fleet.environment).returncode:
                return code
        if not once:
            print("\nCtrl-C stops everything", flush=True)
            while True:
                time.sleep(3600)
    return 0


def show(fleet: Fleet) -> None:
    print(f"\n{'balancer':<12} {fleet.url}    the service, with its console")
    for member in fleet.members:
        print(f"{member.name:<12} {member.url}{'' if member.program == 'serve' else '/metrics'}")
    print(f"{'Prometheus':<12} http://127.0.0.1:{fleet.prometheus_port}")
    print(f"{'Redis':<12} {fleet.redis.url}")
    print(f"{'S3':<12} http://127.0.0.1:{fleet.store.port}")
    print(f"{'logs':<12} {fleet.folder}/*/log\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())
