"""NIXL's progress thread, which spins with its Python API's settings, gets a poll timeout."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvrelay.executors.vllm.nixl_child import POLL_TIMEOUT_US, let_progress_thread_sleep


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
