"""Code that runs in vLLM's processes: as ``child``, and process groups of one rank share a thread.

vLLM creates a dozen process groups, also for a single rank. Each has a thread in gloo that wakes up a hundred times a
second, which together is more CPU time than all else in an idle worker.
"""

from __future__ import annotations

import datetime
import importlib
import os
from typing import Any

import torch.distributed.distributed_c10d as c10d

from kvrelay.engines.vllm.child import CPU_EXPERTS, WorkerExtension

__all__ = ["WorkerExtension"]

DEFAULT_TIMEOUT = datetime.timedelta(minutes=30)


def share_gloo_device(module: Any) -> None:
    """From now on the process groups of one rank that ``module`` (torch's) makes have one device, so one thread."""
    original = module.ProcessGroupGloo
    devices: list[object] = []

    class SharingProcessGroup(original):  # type: ignore[misc, valid-type]
        def __init__(self, store: object, rank: int, size: int, timeout: datetime.timedelta = DEFAULT_TIMEOUT) -> None:
            if size > 1:
                super().__init__(store, rank, size, timeout=timeout)
                return
            if not devices:
                # Nobody connects to it.
                devices.append(original.create_device(hostname="127.0.0.1"))
            options = original._Options()
            options._devices = devices
            options._timeout = timeout
            super().__init__(store, rank, size, options)

    module.ProcessGroupGloo = SharingProcessGroup


# Another torch may build its groups in another way.
if hasattr(getattr(getattr(c10d, "ProcessGroupGloo", None), "_Options", None), "_devices"):
    share_gloo_device(c10d)

if CPU_EXPERTS in os.environ:
    importlib.import_module("kvrelay.engines.vllm.cpu_experts").prepare()
