"""Keeps what tests of faults measure with their results, and what real vLLM answers by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.system import real_vllm, recovery


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file whose collection takes seconds, and which has tests of the matrix only."""
    is_left_out = collection_path.name == "test_openapi_matrix.py" and "not matrix" in config.option.markexpr
    return is_left_out or None  # None: the usual rules decide


@pytest.fixture(autouse=True)
def _recovery_figures(record_property: Callable[[str, object], None]) -> Iterator[None]:
    recovery.clear()
    yield
    for name, value in recovery.properties().items():
        record_property(name, value)


@pytest.fixture(scope="session")
def plain_vllm(vllm_files: None) -> Iterator[real_vllm.PlainVllm]:
    with real_vllm.PlainVllm() as plain:
        yield plain


@pytest.fixture(scope="session")
def asked(plain_vllm: real_vllm.PlainVllm) -> list[real_vllm.Asked]:
    """Two sets of prompts with vLLM's own answers; computed once, since vLLM takes its time to start."""
    return plain_vllm.ask(real_vllm.draw_prompts(5), real_vllm.draw_prompts(6))


@pytest.fixture(scope="session")
def vllm_files() -> Iterator[None]:
    """vLLM's sockets and rendezvous files, which it leaves behind when it is killed, go to a directory that does not
    stay."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        patch.setenv("VLLM_RPC_BASE_PATH", directory)
        yield
