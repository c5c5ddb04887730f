"""Host memory of a KV pool that other processes must map: what the builder of an engine gets beside the settings."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostMemory:
    """``allocate(num_bytes)`` returns zeroed memory, ``reserve()`` the open file of that memory in advance, for an
    engine of several processes. None: any memory is suitable."""

    allocate: Callable[[int], mmap.mmap] | None = None
    reserve: Callable[[], int] | None = None


ANYWHERE = HostMemory()
