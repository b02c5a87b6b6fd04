"""The console and the API behind a real nginx, with the configuration that docs/security.md shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.support.browsers import chromium
from tests.support.paths import ROOT
from tests.support.ports import accepts_connections, free_port
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until

NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
OPENSSL = shutil.which("openssl")
pytestmark = [
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed: apt-get install nginx"),
    pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed: apt-get install openssl"),
]

HOST = "robot.localhost"  # browsers resolve it to this machine
CONFIGURATION = """\
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
    {server}
}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Without keys."""
    data = learned_folder(tmp_path_factory.mktemp("proxy") / "robot")
    with running_server(data, threads=1, trusted_hosts=HOST, trusted_proxies="127.0.0.1") as running:
        yield running


@pytest.fixture(scope="module")
def proxy(server: RunningServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of nginx, as a browser sees it."""
    folder = tmp_path_factory.mktemp("nginx")
    port = free_port()
    certificate(folder)
    page = (ROOT / "docs" / "security.md").read_text()
    (shown,) = re.findall(r"^```nginx\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for old, new in {
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "robot.example;": f"{HOST};",
        "/etc/ssl/robot.example": str(folder / "tls"),
        "http://127.0.0.1:8000": server.url,
    }.items():
        assert old in shown
        shown = shown.replace(old, new)
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, server=shown))
    assert NGINX is not None
    running = subprocess.Popen([NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf")])
    try:
        wait_until(lambda: accepts_connections(port) or running.poll() is not None)
        assert running.poll() is None, (folder / "error.log").read_text()
        yield f"https://{HOST}:{port}"
    finally:
        running.terminate()
        running.wait(20)


def certificate(folder: Path) -> None:
    assert OPENSSL is not None
    options = ["-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={HOST}"]
    files = ["-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.pem")]
    subprocess.run([OPENSSL, "req", "-x509", *options, *files], check=True, capture_output=True)


def ask(proxy: str, method: str, path: str, **arguments: Any) -> httpx.Response:
    """A request to nginx on this machine, whatever its name resolves to."""
    name = proxy.removeprefix("https://")
    headers = {"Host": name, **arguments.pop("headers", {})}
    address = f"https://127.0.0.1:{name.rpartition(':')[2]}"
    return httpx.request(method, f"{address}{path}", headers=headers, verify=False, timeout=30, **arguments)


def test_programs_and_own_pages_are_answered_and_others_are_not(proxy: str) -> None:
    assert ask(proxy, "GET", "/versions").json()["serving"] == 3
    assert ask(proxy, "POST", "/predict", content=known_image("class 0")).status_code == 200
    activate = ("POST", "/versions/3/activate")
    assert ask(proxy, *activate, headers={"Origin": proxy, "Sec-Fetch-Site": "same-origin"}).status_code == 200
    for headers in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        assert ask(proxy, *activate, headers=headers).json()["code"] == "foreign_origin"
    assert ask(proxy, "GET", "/versions", headers={"Host": "evil.example"}).status_code == 421
    assert ask(proxy, "GET", "/versions/").headers["location"] == f"{proxy}/versions"


def test_the_console_works_behind_the_proxy(proxy: str, server: RunningServer) -> None:
    with chromium() as browser:
        context = browser.new_context(ignore_https_errors=True)
        page = context.new_page()
        page.goto(f"{proxy}/#/versions/2")
        page.get_by_role("button", name="Roll back to this version").click()
        page.get_by_role("button", name="Activate version 2").click()
        server.wait_for_version(2)
        context.close()
