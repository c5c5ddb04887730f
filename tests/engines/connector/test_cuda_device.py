"""What the copies ask of CUDA, with a CUDA that writes down what it is asked."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvrelay.engines.connector import device as device_module
from kvrelay.engines.connector.device import CudaDevice, HostDevice, device_of

GPU = torch.device("cuda", 1)


class FakeCuda:
    """As torch.cuda, as far as it is used."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.asked: list[tuple[Any, ...]] = []
        self.Stream = lambda device: FakeCudaStream(self, f"copies of {device}")

    def current_stream(self, device: torch.device) -> FakeCudaStream:
        return FakeCudaStream(self, f"compute of {device}")

    @contextmanager
    def stream(self, stream: FakeCudaStream) -> Iterator[None]:
        self.asked.append(("in", stream.name))
        yield
        self.asked.append(("out", stream.name))

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.asked.append(("on", str(device)))
        yield

    def Event(self, *, blocking: bool) -> FakeCudaEvent:
        assert blocking, "the thread that waits would spin"
        return FakeCudaEvent(self)

    def cudart(self) -> FakeCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.asked.append(("pin", address, num_bytes, flags))
        return self.error


class FakeCudaStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_event(self, event: FakeCudaEvent) -> None:
        self._cuda.asked.append((self.name, "waits for", event.stream))


class FakeCudaEvent:
    stream = ""

    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self, stream: FakeCudaStream) -> None:
        self.stream = stream.name

    def query(self) -> int:
        return 1

    def synchronize(self) -> None:
        self._cuda.asked.append(("synchronize", self.stream))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(device_module, "_cuda", fake)
    return fake


def test_copies_wait_for_the_forward_pass_and_the_host_for_the_copies(cuda: FakeCuda) -> None:
    device = CudaDevice(GPU)
    device.copies.wait(device.compute.record())
    device.copies.run(lambda: cuda.asked.append(("work",)))
    event = device.copies.record()
    assert event.is_done() is True
    event.wait()
    device.compute.wait(event)
    compute, copies = "compute of cuda:1", "copies of cuda:1"
    assert cuda.asked == [
        (copies, "waits for", compute),
        *(("in", copies), ("work",), ("out", copies)),
        *(("on", "cuda:1"), ("synchronize", copies)),
        (compute, "waits for", copies),
    ]


@pytest.mark.parametrize("error", [0, 2])
def test_the_pool_is_registered_or_the_log_says_that_copies_are_slow(
    cuda: FakeCuda, error: int, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.error = error
    pool = torch.zeros(6, dtype=torch.float32)
    with caplog.at_level(logging.WARNING):
        CudaDevice(GPU).pin(pool)
    assert cuda.asked == [("pin", pool.data_ptr(), 24, 0)]
    assert ("CUDA error 2" in caplog.text) == bool(error)


def test_kv_in_host_memory_needs_no_cuda(cuda: FakeCuda) -> None:
    assert isinstance(device_of(torch.zeros(1)), HostDevice)
    assert cuda.asked == []
