"""The address of a server for the others that share its inbox."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from models.errors import OpenWorldError
from service.main import advertised_address
from service.settings import ServiceSettings


def settings(data: Path, **given: Any) -> ServiceSettings:
    given = {"host": "0.0.0.0", "shared": ("recent", "inbox"), **given}
    keys = "robot:predict:0123456789abcdef0123456789abcdef"
    return ServiceSettings(data=data, redis_url=SecretStr("redis://127.0.0.1:1"), keys=keys, **given)  # type: ignore[arg-type]


def test_a_server_of_a_shared_inbox_does_not_advertise_loopback_to_other_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    with pytest.raises(OpenWorldError, match="OPENWORLD_SERVE_ADVERTISE"):
        advertised_address(settings(tmp_path), 8000)
    given = settings(tmp_path, advertise="http://10.0.0.5:8000")
    assert advertised_address(given, 8000) == "http://10.0.0.5:8000"
    assert advertised_address(settings(tmp_path, host="127.0.0.1"), 8000) == "http://127.0.0.1:8000"
    assert advertised_address(settings(tmp_path, shared=()), 8000) == "http://127.0.1.1:8000"
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.7")
    assert advertised_address(settings(tmp_path), 8000) == "http://10.0.0.7:8000"
