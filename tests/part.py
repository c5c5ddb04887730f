"""A plugin of pytest (``make test-matrix PART=2/3``): one part of the tests, the same in every process and run.

The matrices repeat what the suite has in small over many cells. Continuous integration runs a third of the cells for a
commit, by its hash, so that a few commits run them all.
"""

from __future__ import annotations

import zlib

import pytest


def part_of(node_id: str, num_parts: int) -> int:
    """In which of ``num_parts`` parts a test is, from 1 on."""
    return zlib.crc32(node_id.encode()) % num_parts + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=parsed_part, default=(1, 1), metavar="K/N", help="only the K-th of N parts of the tests"
    )


def parsed_part(text: str) -> tuple[int, int]:
    """``K/N``. Raises UsageError."""
    try:
        number, num_parts = (int(field) for field in text.split("/"))
    except ValueError:
        raise pytest.UsageError(f"--part {text}: K/N is wanted, as 1/3") from None
    if not 1 <= number <= num_parts:
        raise pytest.UsageError(f"--part {text}: K is from 1 to N")
    return number, num_parts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, num_parts = config.getoption("--part")
    out = [item for item in items if part_of(item.nodeid, num_parts) != number]
    if out:
        config.hook.pytest_deselected(items=out)
        items[:] = [item for item in items if part_of(item.nodeid, num_parts) == number]
