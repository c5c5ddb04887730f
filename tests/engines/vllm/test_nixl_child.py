"""With vLLM's NIXL connector: NIXL's progress thread sleeps, and the computing thread stays on its own core."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from kvrelay.engines.vllm import nixl_child
from kvrelay.engines.vllm.cores import CORES, thread_environment
from kvrelay.engines.vllm.nixl_child import POLL_TIMEOUT_US, let_progress_thread_sleep


def test_a_poll_timeout_of_zero_becomes_one_that_lets_the_thread_sleep() -> None:
    compiled = pytest.importorskip("nixl_cu13._bindings")
    bindings = SimpleNamespace(nixlAgentConfig=compiled.nixlAgentConfig)
    let_progress_thread_sleep(bindings)
    config = bindings.nixlAgentConfig()
    config.pthrDelay = 0
    assert config.pthrDelay == POLL_TIMEOUT_US
    config.pthrDelay = 5
    assert config.pthrDelay == 5
    config.useProgThread = True
    assert isinstance(config, compiled.nixlAgentConfig)
    assert compiled.nixlAgent("sleeps", config).getAvailPlugins()


def test_the_computing_thread_returns_to_its_own_core(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    monkeypatch.setenv(CORES, thread_environment(allowed[:1], 1)[CORES])
    found = []

    def compute() -> None:
        os.sched_setaffinity(0, allowed[-1:])  # as vLLM's connector does
        nixl_child.NixlWorkerExtension().kvrelay_started()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [{allowed[0]}]
