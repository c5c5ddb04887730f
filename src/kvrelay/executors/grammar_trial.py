"""Grammars are compiled on trial in a process that can be killed, before this process compiles them.

llguidance does not bound compilation: a schema of a kilobyte may take for ever and any amount of memory, and a thread
cannot be cancelled. So a helper process forks once for each grammar, and the fork compiles it under limits of CPU time
and memory that the kernel enforces. What the fork survives costs this process about the same, once.

    GrammarTrials ── one end of a socket pair, for each grammar ──> helper (holds the vocabulary) ── fork ──> trial
                  <── "begun", then the verdict; or the end of the stream: a limit has ended it ──────────────

The helper is this file as a program. It imports no torch. It ends, with its forks, when its
owner closes the control socket or dies.
"""

from __future__ import annotations

import gc
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypedDict

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from kvrelay.core.child_process import start_child_process
from kvrelay.errors import InvalidInputError, WorkerUnavailableError
from kvrelay.executors.grammar_vocabulary import grammar_vocabulary

DEADLINE_S = 40.0
"""If the machine is so busy that ``cpu_s`` take longer, the client may try again."""
NICENESS = 5
"""The engine's steps come first."""

_BEGUN, _END = b"b", b"\n"
_JSON_LINE = re.compile(r"%json (\{.*\})$", re.MULTILINE)
_MAPS, _LISTS = ("$defs", "definitions", "patternProperties", "properties"), ("allOf", "anyOf", "oneOf", "prefixItems")
"""Keywords whose values are schemas by name, and lists of schemas."""


class TooCostlyError(InvalidInputError):
    """Compilation took more CPU time or memory than it may. CPU time depends on what else the machine does."""


class TrialSettings(TypedDict):
    """``limits``: the arguments of LLParserLimits. A grammar may take ``cpu_s``, and (on Linux) ``memory_bytes`` beside
    what the helper has."""

    tokenizer_file: str
    vocab_size: int
    eos_token_ids: list[int]
    limits: dict[str, Any]
    cpu_s: float
    memory_bytes: int


class GrammarTrials:
    """Tries grammars in a helper process, which starts at first use and again if it was killed. Thread-safe."""

    def __init__(self, settings: TrialSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._helper: _Helper | None = None
        self._is_closed = False

    def run(self, source: str) -> int:
        """Compile llguidance's form of a grammar on trial; returns the bytes that it takes.

        Raises InvalidInputError if it does not compile (``param``: the title of the schema at fault in a Lark grammar),
        TooCostlyError if it exceeds a limit; WorkerUnavailableError if no trial could run or it was not over in
        DEADLINE_S.
        """
        try:
            return self._run(source)
        except OSError as exc:  # no descriptor or no process is left
            raise WorkerUnavailableError(f"grammars cannot be compiled now: {exc}") from exc

    def _run(self, source: str) -> int:
        for _ in range(2):  # the helper may have been killed since the last trial
            ours, theirs = socket.socketpair()
            with ours:
                with theirs:
                    helper = self._hand_over(theirs)
                answer = _ask(ours, source)
            if answer is None:
                helper.end()
                raise WorkerUnavailableError(f"the grammar was not compiled in {DEADLINE_S:g} s")
            if len(answer) > 1:
                return _verdict(answer[1:])
            if answer and helper.is_alive:
                cpu_s, mib = self._settings["cpu_s"], self._settings["memory_bytes"] // 2**20
                raise TooCostlyError(f"it takes more than {cpu_s:g} s of CPU time or {mib} MiB of memory to compile")
            helper.end()
        raise WorkerUnavailableError("grammars cannot be compiled now: the helper process ended")

    def close(self) -> None:
        """End the helper and every trial; those who wait get WorkerUnavailableError. Idempotent."""
        with self._lock:
            self._is_closed = True
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()

    def _hand_over(self, channel: socket.socket) -> _Helper:
        with self._lock:
            if self._is_closed:
                raise WorkerUnavailableError("the worker leaves")
            if self._helper is None or not self._helper.send(channel):
                if self._helper is not None:
                    self._helper.end()
                self._helper = _Helper(self._settings)
                self._helper.send(channel)
            return self._helper


class _Helper:
    """The helper process, leader of a process group of its own, in which its forks are."""

    def __init__(self, settings: TrialSettings) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, ExitStack() as unless_started:
            unless_started.callback(self._control.close)
            # The thread that starts it may end long before the worker does: the control socket tells of our end.
            process = start_child_process(
                [sys.executable, "-P", __file__, str(theirs.fileno()), json.dumps(settings)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                death_signal=0,
            )
            unless_started.pop_all()
        self._process = process
        self.end = weakref.finalize(self, _end, process, self._control)

    @property
    def is_alive(self) -> bool:
        return self.end.alive and self._process.poll() is None

    def send(self, channel: socket.socket) -> bool:
        """Begin a trial that talks over ``channel``. False: the helper is gone."""
        try:
            socket.send_fds(self._control, [b"t"], [channel.fileno()])
        except OSError:
            return False
        return True


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    control.close()


def _ask(channel: socket.socket, source: str) -> bytes | None:
    """What the trial says, up to its verdict or its end; None if that is too late."""
    channel.settimeout(DEADLINE_S)
    answer = b""
    try:
        channel.sendall(source.encode())
        channel.shutdown(socket.SHUT_WR)
        while not answer.endswith(_END) and (part := channel.recv(4096)):
            answer += part
    except TimeoutError:
        return None
    except OSError:
        pass
    return answer


def _verdict(answer: bytes) -> int:
    """Raises InvalidInputError."""
    verdict = json.loads(answer)
    if verdict["error"]:
        raise InvalidInputError(verdict["error"], param=verdict["title"])
    return int(verdict["num_bytes"])


# -- in the helper -----------------------------------------------------------------------------------------------------


def _serve(control: socket.socket, settings: TrialSettings) -> None:
    """Fork a trial for each socket that arrives; return when the owner has closed ``control``."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the trials
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    vocabulary = grammar_vocabulary(Path(settings["tokenizer_file"]), settings["vocab_size"])
    tokenizer = LLTokenizer(vocabulary.tokenizer, n_vocab=settings["vocab_size"], eos_token=settings["eos_token_ids"])
    del vocabulary
    limits = LLParserLimits(**settings["limits"])
    # What the library sets up at first use is not set up by each fork.
    warm_up = LLMatcher.grammar_from_json_schema('{"type": "object"}')
    LLMatcher(tokenizer, warm_up, log_level=0, limits=limits).compute_bitmask()
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            return
        with socket.socket(fileno=fds[0]) as channel, suppress(OSError):
            if os.fork() == 0:
                _try(channel, tokenizer, limits, settings)


def _try(channel: socket.socket, tokenizer: LLTokenizer, limits: LLParserLimits, settings: TrialSettings) -> None:
    """In a fork: compile the grammar that ``channel`` brings, and end."""
    try:
        parts = []
        while part := channel.recv(65536):
            parts.append(part)
        source = b"".join(parts).decode()
        os.nice(NICENESS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        _limit(settings["cpu_s"], settings["memory_bytes"])
        channel.sendall(_BEGUN)
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits)
        title = None
        if matcher.is_error():
            title, error = _fault(source, matcher.get_error(), _Compiling(tokenizer, limits, settings["cpu_s"] / 2))
        else:
            # The first mask builds the lexer's first states: a grammar that fails there is refused before it runs.
            matcher.compute_bitmask()
            error = matcher.get_error() if matcher.is_error() else ""
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        channel.sendall(json.dumps({"error": error, "title": title, "num_bytes": grown * 1024}).encode() + _END)
    finally:
        os._exit(0)


class _Compiling:
    """Tells why a schema does not compile, until this process has used ``cpu_s``."""

    def __init__(self, tokenizer: LLTokenizer, limits: LLParserLimits, cpu_s: float) -> None:
        self._tokenizer, self._limits, self._cpu_s = tokenizer, limits, cpu_s

    def error_of(self, schema: dict[str, Any]) -> str:
        """Empty if it compiles, or there is no more time."""
        if time.process_time() > self._cpu_s:
            return ""
        source = LLMatcher.grammar_from_json_schema(json.dumps(schema))
        return str(LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits).get_error())


def _fault(source: str, error: str, compiling: _Compiling) -> tuple[str | None, str]:
    """Which schema of the grammar is at fault, by its title, and where and why; as far as that can be told."""
    if source.startswith("{"):
        schema = json.loads(source)["grammars"][0].get("json_schema")
        return None, _place(schema, error, compiling) if isinstance(schema, dict) else error
    with suppress(ValueError):  # a client's own grammar may have several schemas in a line
        for schema in map(json.loads, _JSON_LINE.findall(source)):
            if told := compiling.error_of(schema):
                return str(schema.get("title", "a schema"))[:100], _place(schema, told, compiling)
    return None, error


def _place(schema: dict[str, Any], error: str, compiling: _Compiling) -> str:
    """The error of the innermost part that does not compile by itself, best for the same reason, and its place."""
    shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    place = "#"
    while True:
        tried = ((path, part, compiling.error_of({**shared, **part})) for path, part in _parts(schema))
        failed = [found for found in tried if found[2]]
        if not failed:
            return error if place == "#" else f"at {place}: {error}"
        path, schema, error = next((found for found in failed if found[2] == error), failed[0])
        place += path


def _parts(schema: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas in a schema, definitions first, with their JSON pointers."""
    for key, value in sorted(schema.items()):
        inner: Iterable[tuple[str, object]] = ()
        if key in _MAPS and isinstance(value, dict):
            inner = ((f"/{name.replace('~', '~0').replace('/', '~1')}", part) for name, part in value.items())
        elif key in _LISTS and isinstance(value, list):
            inner = ((f"/{number}", part) for number, part in enumerate(value))
        elif key in ("additionalProperties", "items"):
            inner = [("", value)]
        yield from ((f"/{key}{name}", part) for name, part in inner if isinstance(part, dict))


def _limit(cpu_s: float, memory_bytes: int) -> None:
    """From now on the kernel ends this process if it needs more."""
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory_bytes, size + memory_bytes))
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as main_control:
        _serve(main_control, json.loads(sys.argv[2]))
    os.killpg(0, signal.SIGKILL)
