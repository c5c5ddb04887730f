"""The machine on which something was measured, for reports."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from pathlib import Path

import psutil


def describe_machine() -> str:
    """Processor, cores, memory, GPUs, system and Python, in one line."""
    names = []
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    gpus = sorted(Path("/proc/driver/nvidia/gpus").glob("*"))
    accelerators = f"{len(gpus)} NVIDIA GPUs" if gpus else "no GPU"
    system = f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    return f"{processor}, {cores} cores, {memory}, {accelerators}, {system}"
