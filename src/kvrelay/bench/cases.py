"""Cases: servers to measure, either running already or started and stopped by the tool.

A started server leads its own process group, so that stopping it leaves none of its children behind.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from kvrelay.bench.client.connection import ConnectionPool, Target, parse_target
from kvrelay.bench.client.service import wait_until_healthy
from kvrelay.bench.errors import BenchError, ServerDownError
from kvrelay.core.child_process import start_child_process
from kvrelay.errors import InvalidInputError
from kvrelay.http import reserve_port

PORT_PLACE = "{port}"
_POLL_S = 0.05
_GROUP_GONE_S = 1.0
_LOG_TAIL_BYTES = 4096
_C = TypeVar("_C")


class Case(msgspec.Struct, frozen=True):
    """A named server: an address, or a command with ``{port}`` where its port belongs."""

    name: str
    url: str | None = None
    command: str | None = None


class CaseTimes(msgspec.Struct, frozen=True):
    """Seconds within which a started server must become healthy, and must end after SIGTERM before it is killed."""

    start_s: float = 120.0
    stop_s: float = 20.0


def parse_case(text: str) -> Case:
    """Read ``name=URL`` or ``name=command ... {port} ...``. Raises InvalidInputError."""
    name, separator, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not (separator and name and value) or "/" in name:
        raise InvalidInputError(f"{text!r} is not NAME=URL or NAME='COMMAND ... {PORT_PLACE} ...'", param="case")
    if value.startswith(("http://", "https://")):
        parse_target(value)
        return Case(name, url=value)
    if PORT_PLACE not in value:
        raise InvalidInputError(f"the command of case {name} must contain {PORT_PLACE}", param="case")
    try:
        shlex.split(value)
    except ValueError as exc:
        raise InvalidInputError(f"the command of case {name}: {exc}", param="case") from exc
    return Case(name, command=value)


def check_names(cases: tuple[Case, ...]) -> None:
    """Refuse an empty list and a name used twice."""
    names = [case.name for case in cases]
    if not names or len(set(names)) != len(names):
        raise InvalidInputError(f"cases need different names, and at least one: {', '.join(names) or 'none given'}")


def turns_of(cases: Sequence[_C], num_rounds: int) -> Iterator[tuple[int, _C]]:
    """Each case once a round, with the round's number from 1. Every other round goes backwards, so that a drift of the
    machine affects all cases alike."""
    for number in range(1, num_rounds + 1):
        for case in cases[:: 1 if number % 2 else -1]:
            yield number, case


@asynccontextmanager
async def running(case: Case, log_dir: Path, times: CaseTimes, api_key: str | None = None) -> AsyncIterator[Target]:
    """The case's server, healthy; a server that was started here is always stopped at the end."""
    if case.command is None:
        yield parse_target(case.url or "", api_key)
        return
    log_path = log_dir / f"{case.name.replace(' ', '-')}.log"
    # Kept until the server listens, which may take minutes: the kernel would give it to any other program.
    with reserve_port("127.0.0.1", 0) as reserved:
        target = Target("127.0.0.1", reserved.getsockname()[1], api_key=api_key)
        process = _start(case, case.command.replace(PORT_PLACE, str(target.port)), log_path)
        try:
            await _healthy(case, process, target, log_path, times.start_s)
            yield target
        finally:
            await _stop(process, times.stop_s)


def _start(case: Case, command: str, log_path: Path) -> subprocess.Popen[bytes]:
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("ab") as log:
            log.write(f"$ {command}\n".encode())
            log.flush()
            return start_child_process(shlex.split(command), stdout=log, stderr=log, death_signal=signal.SIGTERM)
    except OSError as exc:
        raise InvalidInputError(f"case {case.name} cannot be started: {exc}", param="case") from exc


async def _healthy(
    case: Case, process: subprocess.Popen[bytes], target: Target, log_path: Path, timeout_s: float
) -> None:
    def check_alive() -> None:
        code = process.poll()
        if code is not None:
            raise BenchError(f"case {case.name} ended with code {code} at its start: {_last_line(log_path)}")

    async with ConnectionPool(target) as pool:
        try:
            await wait_until_healthy(pool, timeout_s, check_alive)
        except ServerDownError as exc:
            raise BenchError(f"case {case.name}: {exc.message}; its log is {log_path}") from exc


async def _stop(process: subprocess.Popen[bytes], timeout_s: float) -> None:
    _signal_group(process, signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    try:
        while process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
    finally:
        # Also after a clean end: processes that the leader left behind must not disturb the next case.
        _signal_group(process, signal.SIGKILL)
        process.wait()
        gone_by = time.monotonic() + _GROUP_GONE_S
        while _signal_group(process, 0) and time.monotonic() < gone_by:
            await asyncio.sleep(_POLL_S)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Whether a process in the group received the signal."""
    try:
        os.killpg(process.pid, number)
    except ProcessLookupError:
        return False
    return True


def _last_line(log_path: Path) -> str:
    tail = log_path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").strip().splitlines()
    return tail[-1][:200] if tail else "it wrote nothing"
