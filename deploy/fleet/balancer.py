"""nginx in front of the servers: least connections, and another server where a connection is refused."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from deploy.fleet.programs import Process, required_program, start_process, wait_for

# One process, so that it cannot leave workers behind. A request that has reached a server is not sent again, except for
# predictions, which change nothing; `kill -9` of a server breaks those that it was computing.
CONFIGURATION = """\
daemon off; master_process off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    client_max_body_size 2g;
    upstream servers {{
        least_conn;
{servers}
        keepalive 32;
    }}
    proxy_http_version 1.1;
    proxy_set_header Connection "";
    proxy_set_header Host $http_host;
    proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for;
    proxy_set_header X-Forwarded-Proto $scheme;
    proxy_connect_timeout 1s;
    proxy_next_upstream error timeout;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://servers; }}
        location = /predict {{ proxy_pass http://servers; proxy_next_upstream error timeout non_idempotent; }}
    }}
}}
"""


def start_balancer(folder: Path, port: int, servers: Sequence[int]) -> Process:
    """Start nginx on a port, in front of servers on other ports."""
    folder.mkdir(parents=True)
    lines = "\n".join(f"        server 127.0.0.1:{one} max_fails=1 fail_timeout=1s;" for one in servers)
    config = folder / "nginx.conf"
    config.write_text(CONFIGURATION.format(folder=folder, port=port, servers=lines))
    process = start_process([required_program("nginx"), "-p", str(folder), "-c", str(config)], folder)
    wait_for("nginx", lambda: accepts_connections(port), folder / "error.log", process)
    return process


def accepts_connections(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
