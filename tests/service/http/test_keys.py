"""Who may do what, how much of it, and that nobody hears a secret."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.errors import Overloaded, RateLimited
from service.http.auth import Keyring
from service.http.limits import BURST_SECONDS, MAX_RETRY_AFTER, Admission, Permit, RateLimiter
from service.keys import ROLES, parse_keys
from service.settings import ServiceSettings
from tests.support.servers import RunningServer, known_image, learned_folder, running_server, wait_until
from tests.support.settings import clean_environment, variables

SECRETS = {
    "predict": "pppppppp-secret-of-a-robot",
    "label": "llllllll-secret-of-a-labeller",
    "operate": "oooooooo-secret-of-an-operator",
}
KEYS = ",".join(f"{role}-key:{role}:{secret}" for role, secret in SECRETS.items())
WRONG = "wwwwwwww-secret-of-nobody"

# Who may call what: the first line that fits. Every operation of the OpenAPI document must fit one.
NOBODY_ASKED: frozenset[str] = frozenset()
WHO: list[tuple[str, frozenset[str]]] = [
    (r"GET /(livez|readyz|metrics)", NOBODY_ASKED),
    (r"POST /(predict|explain)", frozenset({"predict"})),
    (r"GET /(me|pulse|versions|classes|tasks)(/.*)?", frozenset(ROLES)),
    (r"POST /versions/\{version\}/activate", frozenset({"operate"})),
    (r"PATCH /classes/\{name\}", frozenset({"label"})),
    (r"POST /tasks(/.*)?", frozenset({"label"})),
    (r"(GET|POST|DELETE) /novelties(/.*)?", frozenset({"label"})),
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
    return next((roles for pattern, roles in WHO if re.fullmatch(pattern, name)), None)


def owned(server: RunningServer) -> list[tuple[tuple[str, str], frozenset[str]]]:
    """Every operation with the roles that may call it."""
    pairs = ((operation, roles_of(operation)) for operation in operations(server))
    return [(operation, roles) for operation, roles in pairs if roles is not None]


def test_of_every_operation_it_is_said_whose_it_is(server: RunningServer) -> None:
    new = [" ".join(operation) for operation in operations(server) if roles_of(operation) is None]
    assert not new, f"say in WHO who may call {new}"


def ask(http: httpx.Client, operation: tuple[str, str], headers: dict[str, str]) -> httpx.Response:
    """A request that comes as far as the key, and that means nothing beyond it."""
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
def test_each_role_may_do_what_is_its_own_and_nothing_else(server: RunningServer, form: Any) -> None:
    wrong = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for operation, allowed in owned(server):
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


NO_KEY: dict[str, dict[str, str]] = {
    "nothing": {},
    "a key of nobody": {"Authorization": f"Bearer {WRONG}"},
    "a key of nobody in the other form": {"X-API-Key": WRONG},
    "an empty bearer": {"Authorization": "Bearer"},
    "another scheme": {"Authorization": f"Basic {SECRETS['operate']}"},
    "a secret with something after it": {"Authorization": f"Bearer {SECRETS['operate']}x"},
    "a secret cut short": {"Authorization": f"Bearer {SECRETS['operate'][:-1]}"},
    "a name in place of its secret": {"Authorization": "Bearer operate-key"},
    "a whole entry": {"Authorization": f"Bearer {KEYS.split(',')[0]}"},
}


@pytest.mark.parametrize("headers", NO_KEY.values(), ids=NO_KEY)
def test_without_a_key_nothing_but_health_is_answered(server: RunningServer, headers: dict[str, str]) -> None:
    wrong = []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for operation, allowed in owned(server):
            response = ask(http, operation, headers)
            if allowed is NOBODY_ASKED:
                fine = response.status_code == 200
            else:
                fine = (response.status_code, response.headers.get("www-authenticate")) == (401, "Bearer")
                fine = fine and response.json()["code"] == "unauthorized"
            if not fine:
                wrong.append(f"{' '.join(operation)}: {response.status_code} {response.text[:200]}")
    assert not wrong, "\n".join(wrong)


def test_the_document_says_how_to_show_a_key(server: RunningServer) -> None:
    document = server.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["key"] == {"type": "http", "scheme": "bearer"}
    assert document["security"] == [{"key": []}]


def test_nobody_hears_a_secret(server: RunningServer) -> None:
    secrets, said = [*SECRETS.values(), WRONG], []
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for secret in secrets:
            for headers in ({"Authorization": f"Bearer {secret}"}, {"X-API-Key": secret}, {"Authorization": secret}):
                said += [ask(http, operation, headers) for operation in operations(server)]
                said.append(http.post("/predict", content=known_image("class 0"), headers=headers))
            # Also where a secret has no business to be.
            said += [http.post(f"/predict?version={secret}&key={secret}", headers={"X-Request-Timeout": secret})]
            said += [http.get(f"/{secret}"), http.post(f"/versions/{secret}/activate"), http.get("/metrics")]
    wait_until(lambda: len(server.log_lines()) > len(said) // 2)
    told = "\n".join(f"{response.headers} {response.text}" for response in said) + server.log.read_text()
    assert not [secret for secret in secrets if secret in told]
    assert "predict-key" in server.log.read_text()  # names are told: who it was is worth knowing
    assert 'client="predict-key"' in server.get("/metrics").text


# At the start


def start(**settings: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment() | variables(**settings, port=0)
    command = [sys.executable, "-m", "openworld", "serve", "--data", "/nonexistent/robot"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_keys_it_refuses_to_listen_to_everybody_and_says_the_way_out(host: str) -> None:
    done = start(host=host)
    assert done.returncode == 2
    assert "OPENWORLD_KEYS=" in done.stderr
    assert "127.0.0.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_keys_are_refused_at_the_start_without_telling_them() -> None:
    done = start(keys=f"robot:fly:{WRONG}")
    assert done.returncode == 2
    assert "key 1" in done.stderr
    assert "OPENWORLD_KEYS" in done.stderr
    assert WRONG not in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "10.0.0.1", "robot.example", "", "127.0.0.1.example"])
def test_other_hosts_need_keys(host: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there are no keys"):
        ServiceSettings(data=tmp_path, host=host, keys=())
    assert ServiceSettings(data=tmp_path, host=host, keys=parse_keys(KEYS)).keys


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_none(host: str, tmp_path: Path) -> None:
    assert ServiceSettings(data=tmp_path, host=host, keys=()).host == host


# Parsing

BAD_ENTRIES = {
    "no colon": f"{WRONG}",
    "no roles": f"robot:{WRONG}",
    "no secret": "robot:predict",
    "an empty secret": "robot:predict:",
    "no name": f":predict:{WRONG}",
    "a name with a space": f"ro bot:predict:{WRONG}",
    "a name of 65 letters": f"{'r' * 65}:predict:{WRONG}",
    "an unknown role": f"robot:fly:{WRONG}",
    "a known and an unknown role": f"robot:predict+fly:{WRONG}",
    "an empty role": f"robot::{WRONG}",
    "a role in capitals": f"robot:PREDICT:{WRONG}",
    "a short secret": "robot:predict:wwwwwwww",
    "the same name twice": f"robot:label:{SECRETS['label']},robot:predict:{WRONG}",
    "the same secret twice": f"robot:label:{WRONG},other:predict:{WRONG}",
    "a comma in a secret": f"robot:predict:{WRONG},{WRONG}",
    "the role and the secret swapped": f"robot:{WRONG}:predict",
    "the name and the secret swapped": f"{WRONG}:predict:robot",
}


@pytest.mark.parametrize("text", BAD_ENTRIES.values(), ids=BAD_ENTRIES)
def test_a_bad_entry_is_named_and_its_secret_is_not(text: str) -> None:
    with pytest.raises(ValueError, match=r"^key ") as found:
        parse_keys(f"good:operate:{SECRETS['operate']},{text}")
    assert re.match(r"key (2|3|robot|other)\b", str(found.value))
    assert not [secret for secret in ("wwwwwwww", *SECRETS.values()) if secret in str(found.value)]


def test_keys_are_read_with_their_roles_and_without_their_secrets() -> None:
    keys = parse_keys(f" a:predict:{SECRETS['predict']} ,, b.c_d-e:label+operate:with:colons:{WRONG},")
    assert [(key.name, key.roles) for key in keys] == [("a", {"predict"}), ("b.c_d-e", {"label", "operate"})]
    assert not [key for key in keys if "secret" in repr(key) or "secret" in str(vars(key))]
    ring = Keyring(keys)
    assert ring
    assert ring.find(f"with:colons:{WRONG}") == keys[1]
    assert ring.find(None) is ring.find("") is ring.find("a") is None


def test_without_keys_anybody_may_do_everything() -> None:
    anyone = Keyring(parse_keys("")).find(None)
    assert anyone is not None
    assert (anyone.name, anyone.roles) == ("anonymous", ROLES)


# Rates

ROBOT, OTHER = "robot", "other"


def test_a_key_beyond_its_rate_is_sent_away_and_others_are_not(tmp_path: Path) -> None:
    keys = f"fast:predict:{SECRETS['predict']},slow:predict:{WRONG}"
    settings = {"rate_limit": 0.5, "max_request_images": 3, "threads": 1, "inbox": "false"}
    with running_server(learned_folder(tmp_path / "robot"), keys=keys, **settings) as server:
        fast, slow = ({"X-API-Key": secret} for secret in (SECRETS["predict"], WRONG))
        image = known_image("class 0")
        assert [server.post("/predict", content=image, headers=fast).status_code for _ in range(3)] == [200] * 3
        refused = server.post("/predict", content=image, headers=fast)
        assert (refused.status_code, refused.json()["code"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] in ("1", "2")
        assert "fast" in refused.json()["detail"]
        assert server.post("/predict", content=image, headers=slow).status_code == 200
        assert server.metric("openworld_rejected_total", reason="rate_limited") == 1
        assert server.get("/versions", headers=fast).status_code == 200  # only images are counted
        wait_until(lambda: server.post("/predict", content=image, headers=fast).status_code == 200, 10)


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_holds_two_seconds_worth_and_fills_at_its_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(10, 1, clock)
    limiter.take(ROBOT, 20)
    with pytest.raises(RateLimited) as found:
        limiter.take(ROBOT, 1)
    assert found.value.retry_after == pytest.approx(0.1)
    limiter.take(OTHER, 20)  # has a bucket of its own
    clock.now += 0.55
    limiter.take(ROBOT, 5)
    with pytest.raises(RateLimited):
        limiter.take(ROBOT, 1)
    clock.now += 3600
    limiter.take(ROBOT, 20)  # and no more than that, however long it was quiet
    with pytest.raises(RateLimited):
        limiter.take(ROBOT, 1)


def test_the_largest_request_always_fits_a_full_bucket() -> None:
    limiter = RateLimiter(0.1, 64, Clock())
    limiter.take(ROBOT, 64)
    with pytest.raises(RateLimited) as found:
        limiter.take(ROBOT, 64)
    assert found.value.retry_after == pytest.approx(640)


def test_no_rate_is_no_limit() -> None:
    limiter = RateLimiter(0, 1, Clock())
    for _ in range(100):
        limiter.take(ROBOT, 1000)


@given(
    rate=st.floats(0.1, 100),
    requests=st.lists(st.tuples(st.floats(0, 10), st.integers(1, 64)), max_size=60),
)
def test_whoever_comes_back_when_told_is_served_and_nobody_exceeds_the_rate(
    rate: float, requests: list[tuple[float, int]]
) -> None:
    clock, taken = Clock(), 0
    limiter = RateLimiter(rate, 64, clock)
    for pause, images in requests:
        clock.now += pause
        try:
            limiter.take(ROBOT, images)
        except RateLimited as error:
            clock.now += error.retry_after + 1e-6
            limiter.take(ROBOT, images)
        taken += images
    assert taken <= max(rate * BURST_SECONDS, 64) + (clock.now - Clock.now) * rate + 1e-3


# Permits


def test_a_permit_gives_back_what_it_took_whatever_happens() -> None:
    admission = Admission(4, 1000, lambda: 0.5)

    def a_request_that_breaks() -> None:
        with admission.enter() as permit:
            permit.grow(images=2, size=900)
            assert (admission.images, admission.bytes) == (3, 900)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        a_request_that_breaks()
    assert (admission.images, admission.bytes) == (0, 0)


def test_who_finds_no_room_is_told_when_to_come_back_and_takes_nothing() -> None:
    admission = Admission(3, 1000, lambda: 0.5)  # two may come in, and one of them may turn out to be two
    with admission.enter() as first, admission.enter():
        with pytest.raises(Overloaded) as found:
            admission.enter()
        assert found.value.retry_after == 1.0  # two images at half a second each
        with pytest.raises(Overloaded):
            first.grow(size=1001)
        assert (admission.images, admission.bytes) == (2, 0)
    assert (admission.images, admission.bytes) == (0, 0)


def test_nobody_is_sent_away_for_long_on_a_guess() -> None:
    admission = Admission(1, 1000, lambda: 3600.0)
    with admission.enter(), pytest.raises(Overloaded) as found:
        admission.enter()
    assert found.value.retry_after == MAX_RETRY_AFTER


STEP = st.one_of(
    st.just(("enter", 0, 0)),
    st.tuples(st.just("grow"), st.integers(0, 5), st.integers(0, 400)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(0)),
    st.tuples(st.just("leave twice"), st.integers(0, 9), st.just(0)),
)


@given(steps=st.lists(STEP, max_size=80))
def test_permits_leak_nothing(steps: list[tuple[str, int, int]]) -> None:
    admission, inside = Admission(8, 1000, lambda: 0.1), list[Permit]()
    for step, number, size in steps:
        try:
            if step == "enter":
                inside.append(admission.enter())
            elif step == "grow" and inside:
                inside[number % len(inside)].grow(images=number, size=size)
            elif inside:
                permit = inside.pop(number % len(inside))
                for _ in range(2 if step == "leave twice" else 1):
                    permit.__exit__(None, None, None)
        except Overloaded:
            pass
        assert len(inside) <= admission.images <= 8
        assert 0 <= admission.bytes <= 1000
    for permit in inside:
        permit.__exit__(None, None, None)
    assert (admission.images, admission.bytes) == (0, 0)
