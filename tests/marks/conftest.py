"""A request whose marks a test writes down, in milliseconds of the frontend's clock."""

from __future__ import annotations

from typing import Any

from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.recorder import Mark
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.trace import Trace
from kvrelay.marks.travel import ProcessMarks, encode
from kvrelay.marks.waterfall import Waterfall, waterfall

ORIGIN_S = 1e6


class ScriptedTrace(Trace):
    """Its own marks are those that the test says."""

    __slots__ = ("scripted",)

    def marks(self) -> list[Mark]:
        return sorted(self.scripted, key=lambda mark: mark.at_s)


class Scene:
    """The clocks of its workers are ahead of the frontend's by so much."""

    def __init__(self, decode_clock_ms: float = 0.0, prefill_clock_ms: float = 0.0) -> None:
        self.trace = ScriptedTrace(RunQueue(), "cmpl-1", "")
        self.trace.scripted = []
        self.trace.received_s = ORIGIN_S
        self.trace.routed("d")
        self._clock_ms = {Role.FRONTEND: 0.0, Role.DECODE: decode_clock_ms, Role.PREFILL: prefill_clock_ms}
        self._of_decode: list[Mark] = []
        self._of_prefill: list[Mark] = []

    def frontend(self, *marks: tuple[Any, ...]) -> None:
        self.trace.scripted += self._on(Role.FRONTEND, marks)
        for mark in self.trace.scripted:
            if mark.phase is Phase.FIRST_TOKEN:
                self.trace.first_s = mark.at_s

    def decode(self, *marks: tuple[Any, ...]) -> None:
        self._of_decode += self._on(Role.DECODE, marks)

    def prefill(self, *marks: tuple[Any, ...]) -> None:
        self._of_prefill += self._on(Role.PREFILL, marks)

    def _on(self, role: Role, marks: tuple[tuple[Any, ...], ...]) -> list[Mark]:
        return [
            Mark(phase, ORIGIN_S + (at_ms + self._clock_ms[role]) / 1e3, *(value or (0.0,)))
            for at_ms, phase, *value in marks
        ]

    def tell(self) -> None:
        """What the workers have marked since the last time arrives."""
        others = ()
        if self._of_prefill:
            others = (encode(ProcessMarks("p", Role.PREFILL, numbers_of(self._of_prefill))),)
        field = encode(ProcessMarks("d", Role.DECODE, numbers_of(self._of_decode)), *others)
        self.trace.attempts[0].fields.append((0.0, field))
        self._of_decode, self._of_prefill = [], []

    def end(self, at_ms: float) -> Waterfall:
        self.trace.ended_s = ORIGIN_S + at_ms / 1e3
        return waterfall(self.trace, "f")


def numbers_of(marks: list[Mark]) -> list[float]:
    return [number for mark in marks for number in mark]
