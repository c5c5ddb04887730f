"""Keeps what tests of faults measure with their results, and what real vLLM answers by itself."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import pytest
from tests.system import real_vllm, recovery


@pytest.fixture(autouse=True)
def _recovery_figures(record_property: Callable[[str, object], None]) -> Iterator[None]:
    recovery.clear()
    yield
    for name, value in recovery.properties().items():
        record_property(name, value)


@pytest.fixture(scope="session")
def asked(vllm_files: None) -> list[real_vllm.Asked]:
    """Two sets of prompts with vLLM's own answers; computed once, since vLLM takes its time to start."""
    return real_vllm.ask_plain_vllm(real_vllm.draw_prompts(5), real_vllm.draw_prompts(6))


@pytest.fixture(scope="session")
def vllm_files() -> Iterator[None]:
    """vLLM's sockets and rendezvous files, which it leaves behind when it is killed, go to a directory that does not
    stay."""
    with tempfile.TemporaryDirectory(prefix="vllm-") as directory, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", directory)
        patch.setenv("VLLM_RPC_BASE_PATH", directory)
        yield
