"""``kvrelay doctor``: every probe in isolation, with a time limit. A probe that crashes, hangs or lies tells as much as
one that works: its line says what became of it."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from kvrelay.bench.report.table import table
from kvrelay.certify.probes import READING, RISKY, Found, Probe, State
from kvrelay.core.decoding import UNREADABLE

READ_LIMIT_S = 5.0
RISKY_LIMIT_S = 60.0

_SEVERITY = (State.OK, State.NOTE, State.UNKNOWN, State.WARN, State.FAIL)


class Diagnosis(msgspec.Struct, frozen=True):
    """All lines, in order."""

    found: tuple[Found, ...]

    @property
    def worst(self) -> State:
        return max((one.state for one in self.found), key=_SEVERITY.index, default=State.UNKNOWN)

    @property
    def exit_code(self) -> int:
        return int(self.worst is State.FAIL)


def diagnose(
    root: Path = Path("/"),
    reading: Mapping[str, Probe] = READING,
    risky: tuple[str, ...] = tuple(RISKY),
    limit_s: float = RISKY_LIMIT_S,
) -> Diagnosis:
    """Run all probes. ``root``: where the kernel's files are. Never raises for what a probe does."""
    found: list[Found] = []
    for name, probe in reading.items():
        found += _read(name, probe, root)
    for name in risky:
        found += _try(name, limit_s)
    return Diagnosis(tuple(found))


def text_of(diagnosis: Diagnosis) -> str:
    """A table, and under it what to do."""
    rows = [(one.state, one.subject, one.is_, one.means) for one in diagnosis.found]
    advice = [f"{one.subject}: {one.do}" for one in diagnosis.found if one.do]
    lines = [table(("", "what", "is", "means for prefill and decode apart"), rows, left=4)]
    if advice:
        lines += ["", "to do:", *(f"  {line}" for line in advice)]
    return "\n".join([*lines, "", "next: kvrelay certify --short"])


def _read(name: str, probe: Probe, root: Path) -> list[Found]:
    """On a thread: a file of a driver that hangs must not hang us."""
    found: list[Found] = []
    failure: list[str] = []

    def look() -> None:
        try:
            found.extend(probe(root))
        except Exception as exc:  # noqa: BLE001 - whatever a probe meets is a finding
            failure.append(f"{type(exc).__name__}: {exc}")

    thread = threading.Thread(target=look, name=f"probe {name}", daemon=True)
    thread.start()
    thread.join(READ_LIMIT_S)
    if thread.is_alive():
        failure.append(f"no answer within {READ_LIMIT_S:g} s")
    return [*found, *(_unknown(name, why) for why in failure)]


def _try(name: str, limit_s: float) -> list[Found]:
    """In a process of its own."""
    command = [sys.executable, "-m", "kvrelay.certify.probes", name]
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=limit_s, check=False, stdin=subprocess.DEVNULL, process_group=0
        )
        if done.returncode == 0:
            return msgspec.json.decode(done.stdout, type=list[Found])
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        how = f"killed by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        return [_unknown(name, f"{how}: {said[-1][:200] if said else 'it said nothing'}", State.FAIL)]
    except subprocess.TimeoutExpired:
        return [_unknown(name, f"no answer within {limit_s:g} s", State.FAIL)]
    except UNREADABLE as exc:
        return [_unknown(name, f"its answer cannot be read: {exc}")]


def _unknown(name: str, why: str, state: State = State.UNKNOWN) -> Found:
    return Found(name, state, why, "the probe could not tell", "find out why; the other lines do not depend on it")
