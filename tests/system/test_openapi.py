"""A running server keeps what its own OpenAPI document promises, whatever requests are made from that document.

For every operation requests are drawn that the document allows, and others that it forbids; each answer must have a
status, a content type, headers and a body that are documented, and what is forbidden must be refused. Allowed requests
may be refused as well: a schema cannot say how long a prompt may be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import pytest
import requests
from hypothesis import strategies as st
from tests.lazily import schemathesis
from tests.patience import PATIENCE_S
from tests.system.serving import Serve

from kvrelay.frontend.api.openapi import documents, openapi_document

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SERVE = ("--engine", "mock", "--prefill", "0", "--decode", "1", "--speedup-ratio", "0")
SHORT = ("--max-model-len", "128", "--max-n", "4")
"""What is generated here is requests, not tokens."""
CHECKS = {
    "positive_data_acceptance": {"enabled": False},
    # The one error of a server that is the client's own wish: a deadline that has passed.
    "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "504"]},
}
DRAWN = {"derandomize": True, "deadline": None, "database": None}
MAX_EXAMPLES = 10
"""Drawn for each operation."""


def load_schema(*, derives: bool) -> Any:
    config = {
        "seed": 1, "request-timeout": PATIENCE_S, "checks": CHECKS, "phases": {"coverage": {"enabled": derives}},
    }  # fmt: skip
    return schemathesis.openapi.from_dict(openapi_document(), config=schemathesis.Config.from_dict(config))


OPERATIONS = [(method, path) for path, methods in openapi_document()["paths"].items() for method in methods]


@pytest.fixture(scope="module")
def server() -> Iterator[Serve]:
    with Serve((*SERVE, *SHORT)) as running:
        yield running
    assert running.process.returncode == 0, running.output
    assert "Traceback" not in running.output


def test_the_document_is_the_servers_own(server: Serve) -> None:
    assert httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).content == documents()[0]


@pytest.fixture(scope="module")
def session() -> Iterator[requests.Session]:
    """One for all requests: making it takes as long as a request."""
    with requests.Session() as one:
        yield one


@pytest.fixture(scope="module")
def schema() -> Any:
    return load_schema(derives=False)


@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_answers_are_as_documented(
    server: Serve, session: requests.Session, schema: Any, method: str, path: str
) -> None:
    """Without schemathesis's own parameters: its tests have one name for all operations, and of tests with one name
    pytest-xdist runs the first."""
    operation = schema[path][method]
    modes = [operation.as_strategy(generation_mode=mode) for mode in schemathesis.GenerationMode]

    @hypothesis.given(st.one_of(modes))
    @hypothesis.settings(max_examples=MAX_EXAMPLES, **DRAWN)
    def check(case: Any) -> None:
        case.call_and_validate(base_url=server.url, session=session)

    check()
