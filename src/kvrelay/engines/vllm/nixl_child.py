"""Code that runs in vLLM's processes with vLLM's NIXL connector: as ``quiet_child``, and NIXL's progress thread sleeps.

NIXL's Python API gives this thread a poll timeout of 0, so it spins: more than half a core in an idle worker, and as
much beside its computation. With a timeout the transports' events wake it up all the same.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from kvrelay.engines.vllm import child, quiet_child

POLL_TIMEOUT_US = 100_000


class NixlWorkerExtension(quiet_child.WorkerExtension):
    def kvrelay_started(self) -> None:
        # vLLM's connector has moved this thread to the machine's last core.
        child.stay_on_cores()


def let_progress_thread_sleep(bindings: Any) -> None:
    """``bindings`` is NIXL's compiled module, whose agents are configured by its ``nixlAgentConfig`` from now on."""
    original = bindings.nixlAgentConfig
    delay = original.pthrDelay
    sleeping = property(delay.__get__, lambda config, value: delay.__set__(config, value or POLL_TIMEOUT_US))
    bindings.nixlAgentConfig = type("SleepingAgentConfig", (original,), {"pthrDelay": sleeping})


def _prepare() -> None:
    # vLLM sets it, but only before NIXL is imported.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # else SIGHUP makes UCX log at level debug
    try:
        api = importlib.import_module("nixl._api")
    except ImportError:
        return  # vLLM says what is missing
    let_progress_thread_sleep(api.nixlBind)


_prepare()
