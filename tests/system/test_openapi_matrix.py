"""More requests than ``test_openapi`` makes, and those that schemathesis derives from each schema.

It derives them when tests are collected, which takes two seconds. ``conftest`` leaves this file out if no test of the
matrix is wanted.
"""

from __future__ import annotations

import re
from typing import Any

import hypothesis
import pytest
import requests
import schemathesis
from tests.system.serving import Serve
from tests.system.test_openapi import DRAWN, OPERATIONS, load_schema, server, session

__all__ = ["server", "session"]

pytest_plugins = ["schemathesis.pytest.plugin"]
"""Where it is needed: as a plugin of its own accord each process would import it, which takes a second."""
pytestmark = [pytest.mark.system, pytest.mark.matrix, pytest.mark.timeout(600)]

MAX_EXAMPLES = 40
"""Drawn for each operation, beside some 150 that are derived."""

schema = load_schema(derives=True)


def of_operation(method: str, path: str) -> Any:
    @schema.include(method=method.upper(), path=path).parametrize()
    @hypothesis.settings(max_examples=MAX_EXAMPLES, **DRAWN)
    def check(server: Serve, session: requests.Session, case: schemathesis.Case) -> None:
        case.call_and_validate(base_url=server.url, session=session)

    return check


# Of tests with one name pytest-xdist runs the first.
for _method, _path in OPERATIONS:
    globals()[re.sub(r"\W+", "_", f"test_{_method}{_path}")] = of_operation(_method, _path)
