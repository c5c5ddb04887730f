"""Where copies run: the streams of a device. The worker half is written against these; only ``CudaDevice`` knows CUDA.

    compute stream    forward n ──record──┐         forward n + 1 ──────── ...
                                          v wait
    copy stream                           copies of step n ──record──> the host sees them complete

Work of one stream runs in order. Two streams know nothing of each other unless one waits for an event of the other.
The host waits for nothing in a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

_log = logging.getLogger(__name__)


class Event(Protocol):
    """A moment in the work of a stream."""

    def is_done(self) -> bool:
        """Whether all work before it is complete. Any thread may ask."""

    def wait(self) -> None:
        """Block the calling thread until it is."""


class Stream(Protocol):
    def run(self, work: Callable[[], None]) -> None:
        """Give it the operations of ``work``. They need not be complete when this returns, or have begun."""

    def record(self) -> Event:
        """The moment after everything that it was given so far."""

    def wait(self, event: Event) -> None:
        """What it is given from now on begins after ``event``. Returns at once."""


class Device(Protocol):
    is_host: bool
    """Whether the staging pool lies in its own memory: then a copy needs no buffer."""

    @property
    def compute(self) -> Stream:
        """The one that vLLM's forward passes use, on the calling thread."""

    @property
    def copies(self) -> Stream: ...

    def pin(self, pool: torch.Tensor) -> None:
        """Copies from and to ``pool``, in host memory, are to need no synchronization."""

    def index(self, block_ids: Sequence[int]) -> torch.Tensor:
        """int64 [n] on the device. Called in ``Stream.run``."""


def device_of(cache: torch.Tensor) -> Device:
    """That of vLLM's KV."""
    return CudaDevice(cache.device) if cache.device.type == "cuda" else HostDevice()


class HostDevice:
    """Work is complete when it was given. It is a stream and an event, too."""

    is_host = True

    @property
    def compute(self) -> Stream:
        return self

    @property
    def copies(self) -> Stream:
        return self

    def pin(self, pool: torch.Tensor) -> None:
        """Host memory is where the KV lies."""

    def index(self, block_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(block_ids, dtype=torch.int64)

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        return _DONE

    def wait(self, event: Event) -> None:
        """There is nothing to wait for."""


class _Done:
    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        """It is."""


_DONE = _Done()


_cuda: Any = torch.cuda


class CudaDevice:
    """Not run on a GPU so far."""

    is_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies = _CudaStream(_cuda.Stream(device), device)

    @property
    def compute(self) -> Stream:
        return _CudaStream(_cuda.current_stream(self._device), self._device)

    @property
    def copies(self) -> Stream:
        return self._copies

    def pin(self, pool: torch.Tensor) -> None:
        error = _cuda.cudart().cudaHostRegister(pool.data_ptr(), pool.nbytes, 0)
        if int(error) != 0:
            _log.warning("the staging pool cannot be pinned (CUDA error %d): copies to it are slow", int(error))

    def index(self, block_ids: Sequence[int]) -> torch.Tensor:
        # From pageable memory the copy would wait for the stream.
        return torch.tensor(block_ids, dtype=torch.int64).pin_memory().to(self._device, non_blocking=True)


class _CudaStream:
    def __init__(self, stream: Any, device: torch.device) -> None:
        self._stream = stream
        self._device = device

    def run(self, work: Callable[[], None]) -> None:
        with _cuda.stream(self._stream):
            work()

    def record(self) -> Event:
        # A blocking event: the thread that waits for it sleeps.
        event = _cuda.Event(blocking=True)
        event.record(self._stream)
        return _CudaEvent(event, self._device)

    def wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._stream.wait_event(event.event)


class _CudaEvent:
    def __init__(self, event: Any, device: torch.device) -> None:
        self.event = event
        self._device = device

    def is_done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        # A thread of its own would otherwise open the first device, which is another rank's.
        with _cuda.device(self._device):
            self.event.synchronize()
