"""The OpenAPI document is valid, its examples match their schemas, and the server answers as documented."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpx2 as httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import APIOperation, Case, GenerationMode
from schemathesis.checks import load_all_checks
from schemathesis.core.result import Ok
from schemathesis.specs.openapi import checks
from schemathesis.specs.openapi.definitions import OPENAPI_31_VALIDATOR

from service.http import problems
from tests.support.redis_servers import RedisServer
from tests.support.servers import RunningServer, learned_folder, running_server

METHODS = ("get", "put", "post", "patch", "delete")
EXAMPLES = 20  # per operation and mode (valid input, invalid input)
OPEN = ("/livez", "/readyz", "/metrics")  # no key needed

Document = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """With a queue, so that every route works."""
    root = tmp_path_factory.mktemp("openapi")
    with (
        RedisServer(root / "redis") as redis,
        running_server(learned_folder(root / "robot"), threads=1, redis_url=redis.url) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def document(server: RunningServer) -> Document:
    found: Document = server.get("/openapi.json").json()
    return found


def operations(document: Document) -> Iterator[tuple[str, Document]]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                yield f"{method.upper()} {path}", item[method]


def parts(node: Any, place: str = "#") -> Iterator[tuple[str, Document]]:
    """Every object in the document, with its JSON pointer."""
    if isinstance(node, dict):
        yield place, node
    for name, child in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        yield from parts(child, f"{place}/{str(name).replace('~', '~0').replace('/', '~1')}")


# The document


def test_the_document_is_valid(document: Document) -> None:
    assert document["openapi"].startswith("3.1")
    assert not [f"{list(error.instance_path)}: {error.message}" for error in OPENAPI_31_VALIDATOR.iter_errors(document)]


def test_every_reference_resolves(document: Document) -> None:
    known = {place for place, _ in parts(document)}
    assert not {node["$ref"] for _, node in parts(document) if isinstance(node.get("$ref"), str)} - known


def test_every_operation_has_a_summary_tags_and_a_unique_id(document: Document) -> None:
    ids = []
    for name, operation in operations(document):
        assert operation.get("summary"), name
        assert operation.get("tags"), name
        assert operation["responses"], name
        ids.append(operation["operationId"])
    assert len(set(ids)) == len(ids)


def test_every_parameter_is_typed(document: Document) -> None:
    for name, operation in operations(document):
        for parameter in operation.get("parameters", []):
            schema = parameter["schema"]
            assert {"type", "anyOf", "$ref", "enum", "const"} & set(schema), f"{name} {parameter['name']}"


def test_documented_errors_are_problems(document: Document) -> None:
    expected = {problems.MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    wrong = []
    for name, operation in operations(document):
        for status, response in operation["responses"].items():
            if status[0] in "45" and not (response["description"] and response["content"] == expected):
                wrong.append(f"{name} {status}: {list(response['content'])}")
    assert not wrong, "\n".join(wrong)
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_every_operation_that_needs_a_key_documents_401(document: Document) -> None:
    for name, operation in operations(document):
        if name.removeprefix("GET ") not in OPEN:
            assert "401" in operation["responses"], name


# Examples


def test_examples_match_their_schemas(document: Document) -> None:
    seen, wrong = 0, {}
    for place, schema in parts(document):
        if not isinstance(schema.get("examples"), list):
            continue
        # With the components, so that references resolve.
        validator = jsonschema_rs.validator_for({**schema, "components": document["components"]})
        for example in schema["examples"]:
            seen += 1
            if errors := [error.message for error in validator.iter_errors(example)]:
                wrong[place] = errors
    assert seen >= 3
    assert not wrong, wrong


# The server


def test_the_document_is_the_same_on_every_request(server: RunningServer, document: Document) -> None:
    assert server.get("/openapi.json").json() == document


def test_an_unsupported_method_is_a_405_that_lists_the_supported_ones(
    server: RunningServer, document: Document
) -> None:
    templates = {path: re.compile(re.sub(r"{\w+}", "[^/]+", path)) for path in document["paths"]}
    with httpx.Client(base_url=server.url, timeout=30) as http:
        for path in templates:
            concrete = re.sub(r"{\w+}", "1", path)
            # /things/all also matches /things/{id}.
            matching = [document["paths"][other] for other, pattern in templates.items() if pattern.fullmatch(concrete)]
            there = {method for item in matching for method in item}
            for method in set(METHODS) - there:
                response = http.request(method.upper(), concrete)
                assert (response.status_code, response.json()["code"]) == (405, "method_not_allowed"), (method, path)
                assert {name.strip().lower() for name in response.headers["allow"].split(",")} <= there


def test_the_docs_load_nothing_from_another_host(server: RunningServer) -> None:
    """They work without internet access."""
    page = server.get("/docs")
    assert page.status_code == 200
    loaded = re.findall(r"""(?:src|href)=["']([^"']+)""", page.text)
    assert loaded
    own = urlsplit(server.url).netloc
    assert not [link for link in loaded if urlsplit(urljoin(server.url, link)).netloc != own]


# Schemathesis: generated input, valid and invalid, to every operation

CHECKS = [
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_every_operation_answers_as_documented(server: RunningServer, mode: GenerationMode) -> None:
    load_all_checks()
    wrong: dict[str, list[str]] = {}
    answered: dict[str, int] = {}
    for result in schemathesis.openapi.from_url(f"{server.url}/openapi.json").get_all_operations():
        assert isinstance(result, Ok), result
        operation = result.ok()
        try:
            answered[operation.label] = try_operation(operation, mode)
        except BaseExceptionGroup as group:
            wrong[operation.label] = [str(error) for error in group.exceptions]
        except AssertionError as error:
            wrong[operation.label] = [str(error)]
    assert not wrong, json.dumps(wrong, indent=1)
    assert answered["POST /predict"] == answered["POST /versions/{version}/activate"] == EXAMPLES
    assert server.process.poll() is None


def try_operation(operation: APIOperation, mode: GenerationMode) -> int:
    """The number of requests that were answered as documented; raises AssertionErrors otherwise."""
    answered = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def answers_as_documented(case: Case) -> None:
        nonlocal answered
        response = case.call(timeout=30)
        # The only 5xx that a valid request can cause: a deadline that is too short.
        hurried = response.status_code == 504 and response.json()["code"] == "deadline_passed"
        assert response.status_code < 500 or hurried, response.text
        case.validate_response(response, checks=CHECKS)
        answered += 1

    with suppress(Unsatisfiable):  # nothing about the operation can be invalid
        answers_as_documented()
    return answered
