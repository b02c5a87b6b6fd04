"""API keys: every operation requires its role, and no secret appears in a response or a log."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from service.http.auth import Keyring
from service.keys import ROLES, parse_keys
from service.settings import ServiceSettings
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until
from tests.support.settings import clean_environment, variables

SECRETS = {
    "predict": "pppppppp-secret-of-a-robot",
    "label": "llllllll-secret-of-a-labeller",
    "operate": "oooooooo-secret-of-an-operator",
    "monitor": "mmmmmmmm-secret-of-a-monitor",
}
KEYS = ",".join(f"{role}-key:{role}:{secret}" for role, secret in SECRETS.items())
UNKNOWN = "wwwwwwww-secret-of-no-key"

# The roles that may call an operation, by the first pattern that matches. Every operation must match one.
NO_KEY_NEEDED: frozenset[str] = frozenset()
ALLOWED_ROLES: list[tuple[str, frozenset[str]]] = [
    (r"GET /(livez|readyz|metrics)", NO_KEY_NEEDED),
    (r"POST /(predict|explain)", frozenset({"predict"})),
    (r"GET /(me|pulse|versions|classes|tasks|refinement)(/.*)?", frozenset(ROLES)),
    (r"GET /audit", frozenset({"operate"})),
    (r"PUT /refinement", frozenset({"operate"})),
    (r"POST /versions/\{version\}/activate", frozenset({"operate"})),
    (r"PATCH /classes/\{name\}", frozenset({"label"})),
    (r"POST /tasks(/.*)?", frozenset({"label"})),
    (r"(GET|POST|DELETE) /novelties(/.*)?", frozenset({"label"})),
    (r"GET /images/\{sha256\}/thumbnail", frozenset({"label"})),
    (r"(GET|POST|DELETE) /images(/.*)?", frozenset({"operate"})),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    data = learned_folder(tmp_path_factory.mktemp("keys") / "robot")
    with running_server(data, threads=1, keys=KEYS, log_level="debug") as running:
        yield running


def operations(server: RunningServer) -> list[tuple[str, str]]:
    paths = server.get("/openapi.json").json()["paths"]
    return [(method.upper(), path) for path, item in paths.items() for method in item]


def roles_of(operation: tuple[str, str]) -> frozenset[str] | None:
    name = " ".join(operation)
    return next((roles for pattern, roles in ALLOWED_ROLES if re.fullmatch(pattern, name)), None)


def operations_with_roles(server: RunningServer) -> list[tuple[tuple[str, str], frozenset[str]]]:
    """Every operation with the roles that may call it."""
    pairs = ((operation, roles_of(operation)) for operation in operations(server))
    return [(operation, roles) for operation, roles in pairs if roles is not None]


def test_every_operation_has_its_roles_listed_here(server: RunningServer) -> None:
    new = [" ".join(operation) for operation in operations(server) if roles_of(operation) is None]
    assert not new, f"add the roles of {new} to ALLOWED_ROLES"


def ask(http: httpx.Client, operation: tuple[str, str], headers: dict[str, str]) -> httpx.Response:
    """A request that is valid up to the check of its key."""
    method, path = operation
    path = re.sub(r"\{version\}", "999", path)
    path = re.sub(r"\{\w+\}", "0" * 64, path)
    body: dict[str, Any] = {} if method in ("GET", "DELETE") or path == "/predict" else {"json": {}}
    return http.request(method, path, headers=headers, **body)


HEADER_FORMS = {
    "bearer": lambda secret: {"Authorization": f"Bearer {secret}"},
    "bearer in another case": lambda secret: {"Authorization": f"bEARER   {secret}"},
    "x-api-key": lambda secret: {"X-API-Key": secret},
    "x-api-key beside another scheme": lambda secret: {"X-API-Key": secret, "Authorization": "Basic cm9ib3Q6eA=="},
}


@pytest.mark.parametrize("form", HEADER_FORMS.values(), ids=HEADER_FORMS)
def test_each_role_may_call_its_own_operations_only(server: RunningServer, form: Any) -> None:
    wrong = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for operation, allowed in operations_with_roles(server):
            for role, secret in SECRETS.items():
                response = ask(http, operation, form(secret))
                refused = (
                    (response.status_code, response.json()["code"]) == (403, "forbidden")
                    if response.is_error
                    else False
                )
                if refused != bool(allowed and role not in allowed) or response.status_code == 401:
                    wrong.append(f"{role} {' '.join(operation)}: {response.status_code} {response.text[:200]}")
    assert not wrong, "\n".join(wrong)


NO_VALID_KEY: dict[str, dict[str, str]] = {
    "nothing": {},
    "an unknown key": {"Authorization": f"Bearer {UNKNOWN}"},
    "an unknown key in the other form": {"X-API-Key": UNKNOWN},
    "an empty bearer": {"Authorization": "Bearer"},
    "another scheme": {"Authorization": f"Basic {SECRETS['operate']}"},
    "a secret with a suffix": {"Authorization": f"Bearer {SECRETS['operate']}x"},
    "a secret cut short": {"Authorization": f"Bearer {SECRETS['operate'][:-1]}"},
    "a name instead of its secret": {"Authorization": "Bearer operate-key"},
    "a whole entry": {"Authorization": f"Bearer {KEYS.split(',')[0]}"},
}


@pytest.mark.parametrize("headers", NO_VALID_KEY.values(), ids=NO_VALID_KEY)
def test_without_a_valid_key_only_health_and_metrics_are_answered(
    server: RunningServer, headers: dict[str, str]
) -> None:
    wrong = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for operation, allowed in operations_with_roles(server):
            response = ask(http, operation, headers)
            if allowed is NO_KEY_NEEDED:
                fine = response.status_code == 200
            else:
                fine = (response.status_code, response.headers.get("www-authenticate")) == (401, "Bearer")
                fine = fine and response.json()["code"] == "unauthorized"
            if not fine:
                wrong.append(f"{' '.join(operation)}: {response.status_code} {response.text[:200]}")
    assert not wrong, "\n".join(wrong)


def test_the_openapi_document_declares_the_key(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]


def test_no_secret_appears_in_a_response_or_the_log(server: RunningServer) -> None:
    secrets, responses = [*SECRETS.values(), UNKNOWN], []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for secret in secrets:
            for headers in ({"Authorization": f"Bearer {secret}"}, {"X-API-Key": secret}, {"Authorization": secret}):
                responses += [ask(http, operation, headers) for operation in operations(server)]
                responses.append(http.post("/predict", content=known_image("class 0"), headers=headers))
            # Also where a secret does not belong.
            responses += [http.post(f"/predict?version={secret}&key={secret}", headers={"X-Request-Timeout": secret})]
            responses += [http.get(f"/{secret}"), http.post(f"/versions/{secret}/activate"), http.get("/metrics")]
    wait_until(lambda: len(server.log_lines()) > len(responses) // 2)
    text = "\n".join(f"{response.headers} {response.text}" for response in responses) + server.log.read_text()
    assert not [secret for secret in secrets if secret in text]
    assert "predict-key" in server.log.read_text()  # names are logged
    operator = {"Authorization": f"Bearer {SECRETS['operate']}"}
    assert 'client="predict-key"' in server.get("/metrics", headers=operator).text


# At startup


def start(**settings: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment() | variables(**settings, port=0)
    command = [sys.executable, "-m", "openworld", "serve", "--data", "/nonexistent/robot"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_server_without_keys_refuses_to_listen_on_all_addresses(host: str) -> None:
    done = start(host=host)
    assert done.returncode == 2
    assert "OPENWORLD_KEYS=" in done.stderr
    assert "127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_keys_are_refused_at_startup_without_quoting_them() -> None:
    done = start(keys=f"robot:fly:{UNKNOWN}")
    assert done.returncode == 2
    assert "key 1" in done.stderr
    assert "OPENWORLD_KEYS" in done.stderr
    assert UNKNOWN not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "10.0.0.1", "robot.example", "", "127.0.0.1.example"])
def test_other_hosts_than_loopback_need_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no keys"):
        ServiceSettings(data=tmp_path, host=host, keys=())
    assert ServiceSettings(data=tmp_path, host=host, keys=parse_keys(KEYS)).keys


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str, tmp_path: Path) -> None:
    assert ServiceSettings(data=tmp_path, host=host, keys=()).host == host


# Parsing

BAD_ENTRIES = {
    "no colon": f"{UNKNOWN}",
    "no roles": f"robot:{UNKNOWN}",
    "no secret": "robot:predict",
    "an empty secret": "robot:predict:",
    "no name": f":predict:{UNKNOWN}",
    "a name with a space": f"ro bot:predict:{UNKNOWN}",
    "a name of 65 letters": f"{'r' * 65}:predict:{UNKNOWN}",
    "an unknown role": f"robot:fly:{UNKNOWN}",
    "a known and an unknown role": f"robot:predict+fly:{UNKNOWN}",
    "an empty role": f"robot::{UNKNOWN}",
    "a role in capitals": f"robot:PREDICT:{UNKNOWN}",
    "a short secret": "robot:predict:wwwwwwww",
    "the same name twice": f"robot:label:{SECRETS['label']},robot:predict:{UNKNOWN}",
    "the same secret twice": f"robot:label:{UNKNOWN},other:predict:{UNKNOWN}",
    "a comma in a secret": f"robot:predict:{UNKNOWN},{UNKNOWN}",
    "the role and the secret swapped": f"robot:{UNKNOWN}:predict",
    "the name and the secret swapped": f"{UNKNOWN}:predict:robot",
}


@pytest.mark.parametrize("text", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_entry_is_named_by_its_position_without_its_secret(text: str) -> None:
    with pytest.raises(ValueError, match=r"^key ") as found:
        parse_keys(f"good:operate:{SECRETS['operate']},{text}")
    assert re.match(r"key (2|3|robot|other)\b", str(found.value))
    assert not [secret for secret in ("wwwwwwww", *SECRETS.values()) if secret in str(found.value)]


def test_keys_are_parsed_with_their_roles_and_do_not_keep_their_secrets() -> None:
    keys = parse_keys(f" a:predict:{SECRETS['predict']} ,, b.c_d-e:label+operate:with:colons:{UNKNOWN},")
    assert [(key.name, key.roles) for key in keys] == [("a", {"predict"}), ("b.c_d-e", {"label", "operate"})]
    assert not [key for key in keys if "secret" in repr(key) or "secret" in str(vars(key))]
    ring = Keyring(keys)
    assert ring
    assert ring.find(f"with:colons:{UNKNOWN}") == keys[1]
    assert ring.find(None) is ring.find("") is ring.find("a") is None


def test_without_keys_every_request_has_every_role() -> None:
    anyone = Keyring(parse_keys("")).find(None)
    assert anyone is not None
    assert (anyone.name, anyone.roles) == ("anonymous", ROLES)
