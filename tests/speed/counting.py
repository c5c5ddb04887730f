"""Counts work instead of time: the same program does the same work on every machine, however busy.

Counted on the thread that asks, and only for code of the package (other packages change with their versions):

  opcodes   Python opcodes that its functions execute
  calls     what it calls outside: functions of Python, of the standard library and of other packages
  torch     torch operators, whoever calls them
  numba     calls of compiled Numba functions from Python
  system    calls into the operating system through Python's modules, and what the event loop sends
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

import kvrelay

PACKAGE = str(kvrelay.__path__[0])
SYSTEM = frozenset({"posix", "_socket", "select", "fcntl", "mmap", "_posixsubprocess", "_posixshmem"})

Counts = Counter[str]


def _module_of(function: Any) -> str | None:
    """Of a built-in function, or of the type whose built-in method it is."""
    owner = getattr(function, "__self__", None)
    module: str | None = getattr(function, "__module__", None)
    return module or (type(owner).__module__ if owner is not None else None)


class _Tracer:
    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._ours: dict[str, bool] = {}

    def _is_ours(self, frame: FrameType | None) -> bool:
        if frame is None:
            return False
        name = frame.f_code.co_filename
        known = self._ours.get(name)
        if known is None:
            known = self._ours[name] = name.startswith(PACKAGE)
        return known

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """Every call of a Python function, on its way in."""
        if self._is_ours(frame):
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
            return self._opcode
        if self._is_ours(frame.f_back):
            self._counts["calls"] += 1
        return None

    def _opcode(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            self._counts["opcodes"] += 1
        return self._opcode

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Every call of a function in C."""
        if event != "c_call":
            return
        if self._is_ours(frame):
            self._counts["calls"] += 1
            if _module_of(argument) in SYSTEM:
                self._counts["system"] += 1
        elif frame.f_code.co_filename.endswith("selector_events.py") and argument.__name__.startswith("send"):
            self._counts["system"] += 1


@contextlib.contextmanager
def _numba_calls(counts: Counts) -> Iterator[None]:
    """Compiled functions are called through a slot of their type that no profiler sees."""
    if "numba" not in sys.modules:
        yield
        return
    from numba.core.registry import CPUDispatcher

    inherited = CPUDispatcher.__call__

    def call(self: Any, *arguments: Any, **named: Any) -> Any:
        counts["numba"] += 1
        return inherited(self, *arguments, **named)

    CPUDispatcher.__call__ = call
    try:
        yield
    finally:
        del CPUDispatcher.__call__


@contextlib.contextmanager
def _torch_operators(counts: Counts) -> Iterator[None]:
    if "torch" not in sys.modules:
        yield
        return
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
            counts["torch"] += 1
            return function(*arguments, **(named or {}))

    with Counting():
        yield


@contextlib.contextmanager
def counting() -> Iterator[Counts]:
    """What this thread does inside. Functions that have begun before are not seen: call something."""
    counts: Counts = Counter()
    tracer = _Tracer(counts)
    gc.collect()
    gc.disable()
    try:
        with _numba_calls(counts), _torch_operators(counts):
            sys.setprofile(tracer.profile)
            sys.settrace(tracer.trace)
            try:
                yield counts
            finally:
                sys.settrace(None)
                sys.setprofile(None)
    finally:
        gc.enable()
