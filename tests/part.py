"""A plugin of pytest (``make test-matrix PART=2/3``): one part of the matrices, the same in every process and run.

The matrices repeat what the suite has in small over many cells. Continuous integration runs a part of the cells for a
commit, by its hash, so that some commits run them all. Tests without the mark ``matrix`` are in every part.
"""

from __future__ import annotations

import zlib

import pytest


def part_of(node_id: str, num_parts: int) -> int:
    """In which of ``num_parts`` parts a test is, from 1 on."""
    return zlib.crc32(node_id.encode()) % num_parts + 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--part", type=parsed_part, default=(1, 1), metavar="K/N", help="of the matrices only the K-th of N parts"
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
    cells = [item for item in items if item.get_closest_marker("matrix")]
    if out := {item for item in cells if part_of(item.nodeid, num_parts) != number}:
        config.hook.pytest_deselected(items=list(out))
        items[:] = [item for item in items if item not in out]
