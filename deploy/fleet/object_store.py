"""SeaweedFS: an object store with S3 gateways, on loopback."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Self
from urllib.error import HTTPError
from urllib.request import urlopen

from deploy.fleet.programs import free_ports, kill_process, required_program, start_process, wait_for

SOCKETS = Path("/tmp")  # of SeaweedFS, whatever TMPDIR is
ACCESS_KEY, SECRET_KEY = "openworld", "of-this-machine-only"


def environment_of(port: int) -> dict[str, str]:
    """The variables by which obstore finds the server on this port."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
    }


class SeaweedFS:
    """A server with an S3 gateway, as a context manager. It can be killed and started again, and has more gateways."""

    def __init__(self, folder: Path, *, tied: bool = True) -> None:
        self._program, self._folder, self._tied = required_program("weed"), folder, tied
        self._ports = free_ports(8)
        self._processes: list[subprocess.Popen[bytes]] = []
        folder.mkdir(parents=True, exist_ok=True)
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        identities = [{"name": "openworld", "credentials": keys, "actions": actions}]
        (folder / "s3.json").write_text(json.dumps({"identities": identities}))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def start(self) -> Self:
        s3, s3_grpc, master, master_grpc, volume, volume_grpc, filer, filer_grpc = map(str, self._ports[:8])
        data = self._folder / "data"
        data.mkdir(exist_ok=True)
        options = ["-dir", str(data), "-ip", "127.0.0.1", "-ip.bind", "127.0.0.1", "-volume.max", "0"]
        options += ["-master.port", master, "-master.port.grpc", master_grpc, "-master.volumeSizeLimitMB", "64"]
        options += ["-volume.port", volume, "-volume.port.grpc", volume_grpc, "-master.telemetry=false"]
        options += ["-master.electionTimeout", "1s", "-master.heartbeatInterval", "100ms"]
        options += ["-filer", "-filer.port", filer, "-filer.port.grpc", filer_grpc]
        options += ["-s3", "-s3.port", s3, "-s3.port.grpc", s3_grpc, "-s3.port.iceberg", "0", "-s3.port.lance", "0"]
        self._start("server", *options, "-s3.config", str(self._folder / "s3.json"))
        wait_for("SeaweedFS", lambda: gateway_answers(self.port), self._folder / "log")
        return self

    def add_gateway(self) -> int:
        """Start another S3 gateway of the same store, and return its port."""
        port, grpc = free_ports(2)
        self._ports += [port, grpc]
        filer = f"127.0.0.1:{self._ports[6]}.{self._ports[7]}"
        options = ["-filer", filer, "-ip.bind", "127.0.0.1", "-port", str(port), "-port.grpc", str(grpc)]
        self._start("s3", *options, "-port.iceberg", "0", "-port.lance", "0", "-config", str(self._folder / "s3.json"))
        wait_for("SeaweedFS", lambda: gateway_answers(port), self._folder / "log")
        return port

    def kill(self) -> None:
        for process in self._processes:
            kill_process(process)
        self._processes.clear()
        for port in self._ports:  # a killed process leaves its sockets
            for left in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    def _start(self, *command: str) -> None:
        self._processes.append(start_process([self._program, "-logtostderr", *command], self._folder, tied=self._tied))


def gateway_answers(port: int) -> bool:
    """Whether the gateway can list its buckets: it listens before it knows its users."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/", timeout=1) as answer:
            return bool(answer.status == 200)
    except HTTPError as error:
        return error.code < 500  # without a signature
    except OSError:
        return False
