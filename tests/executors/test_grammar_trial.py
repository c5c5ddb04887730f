"""Grammars that never compile: they end by themselves, and other grammars compile meanwhile and afterwards."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from llguidance import LLMatcher
from tests.executors.constrained import EOS, VOCAB_SIZE
from tests.patience import PATIENCE_S, until

from kvrelay.core.clock import ManualClock
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.data import bundled_checkpoint_path
from kvrelay.errors import InvalidInputError, KvrelayError, WorkerUnavailableError
from kvrelay.executors import grammar_trial, grammars
from kvrelay.executors.grammar_trial import GrammarTrials, TooCostlyError, TrialSettings
from kvrelay.executors.grammars import GrammarCompiler

pytestmark = pytest.mark.timeout(600)


def all_of(*patterns: str) -> Grammar:
    schema = {"allOf": [{"type": "string", "pattern": pattern} for pattern in patterns]}
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


COUNTING = all_of(*(f".*a.{{{k}}}" for k in range(5, 35)))
"""1.2 kB whose automaton has 2 ** 30 states."""
CONTAINING = all_of(*(f".*x{n}.*" for n in range(300)))
ORDINARY = Grammar(GrammarKind.REGEX, "yes|no")


@pytest.fixture
def compiler() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, [EOS])
    yield found
    found.close()


def own_memory() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def helper_pid() -> int:
    """The helper that was started last."""
    started_s: dict[int, float] = {}
    for child in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):  # a zombie of another test, too
            if grammar_trial.__file__ in child.cmdline():
                started_s[child.pid] = child.create_time()
    return max(started_s, key=started_s.__getitem__)


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_refusal_for_lack_of_time_is_doubted_after_a_while_and_ever_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine was busy, and is idle now."""
    trials: list[str] = []

    def too_costly(_: GrammarTrials, source: str) -> int:
        trials.append(source)
        raise TooCostlyError("it takes more than 1 s of CPU time")

    clock = ManualClock()
    file = bundled_checkpoint_path() / "tokenizer.json"
    with closing(GrammarCompiler(file, VOCAB_SIZE, [EOS], clock)) as compiler:
        with monkeypatch.context() as busy:
            busy.setattr(GrammarTrials, "run", too_costly)
            for _ in range(2 * 3600):
                with pytest.raises(InvalidInputError, match="CPU time"):
                    compiler.compile(ORDINARY)
                clock.advance(1.0)
            assert len(trials) == 7, "after 0, 1, 3, 7, 15, 31 and 63 minutes"
        clock.advance(3600.0)
        compiler.compile(ORDINARY)
        with pytest.raises(InvalidInputError, match="lark"):
            compiler.compile(Grammar(GrammarKind.LARK, "start: ("))
        monkeypatch.setattr(GrammarTrials, "run", too_costly)
        clock.advance(1e9)
        with pytest.raises(InvalidInputError, match="lark"):
            compiler.compile(Grammar(GrammarKind.LARK, "start: ("))


@pytest.mark.parametrize("grammar", [COUNTING, CONTAINING], ids=["counting", "containing"])
def test_six_schemas_that_never_compile_are_refused_and_an_ordinary_grammar_compiles(
    grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a quarter of the usual CPU time, which is a hundred times what an ordinary grammar takes."""
    monkeypatch.setattr(grammars, "COMPILE_CPU_S", 0.25)
    with closing(GrammarCompiler(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, [EOS])) as compiler:
        refuse_six(compiler, grammar)


def refuse_six(compiler: GrammarCompiler, grammar: Grammar) -> None:
    compiler.compile(ORDINARY)
    before = own_memory()
    refused: list[str] = []

    def compile_one(number: int) -> None:
        with pytest.raises(InvalidInputError, match=r"more than 0\.25 s of CPU time or 256 MiB") as failure:
            compiler.compile(Grammar(grammar.kind, grammar.source + " " * number))
        refused.append(failure.value.message)

    threads = [threading.Thread(target=compile_one, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    compiler.compile(Grammar(GrammarKind.REGEX, "maybe"))
    for thread in threads:
        thread.join()
    assert len(refused) == 6
    assert own_memory() - before < 64 * 2**20
    compiler.compile(Grammar(GrammarKind.REGEX, "perhaps"))


def test_memory_alone_ends_a_trial() -> None:
    source = LLMatcher.grammar_from_json_schema(COUNTING.source)
    settings = TrialSettings(
        tokenizer_file=str(bundled_checkpoint_path() / "tokenizer.json"), vocab_size=VOCAB_SIZE, eos_token_ids=[EOS],
        limits={"verbose_errors": False, "initial_lexer_fuel": 500_000}, cpu_s=10_000.0, memory_bytes=16 * 2**20,
    )  # fmt: skip
    trials = GrammarTrials(settings)
    with pytest.raises(InvalidInputError, match="16 MiB"):
        trials.run(source)
    assert trials.run(LLMatcher.grammar_from_regex("yes|no")) < 16 * 2**20
    trials.close()


def test_a_verdict_is_remembered(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = Grammar(GrammarKind.REGEX, "a(b")
    with pytest.raises(InvalidInputError, match="unclosed group") as first:
        compiler.compile(bad)
    compiler.compile(ORDINARY)
    compiler.close()  # nothing can be tried any more
    with pytest.raises(InvalidInputError) as again:
        compiler.compile(bad)
    assert again.value.message == first.value.message
    compiler.compile(ORDINARY)
    with pytest.raises(WorkerUnavailableError):
        compiler.compile(Grammar(GrammarKind.REGEX, "new"))


def test_closing_ends_what_is_under_way(compiler: GrammarCompiler) -> None:
    compiler.compile(ORDINARY)
    pid = helper_pid()
    failures: list[KvrelayError] = []

    def compile_one() -> None:
        try:
            compiler.compile(COUNTING)
        except KvrelayError as exc:
            failures.append(exc)

    thread = threading.Thread(target=compile_one)
    thread.start()
    until(lambda: children(pid))
    trials = children(pid)
    compiler.close()
    thread.join(PATIENCE_S)
    assert len(failures) == 1
    until(lambda: not any(Path(f"/proc/{each}").exists() for each in (str(pid), *trials)))


def test_a_helper_that_was_killed_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(ORDINARY)
    pid = helper_pid()
    os.kill(pid, 9)
    compiler.compile(Grammar(GrammarKind.REGEX, "maybe"))
    assert helper_pid() != pid


def test_a_helper_ends_with_its_owner() -> None:
    owner = GrammarCompiler(bundled_checkpoint_path() / "tokenizer.json", VOCAB_SIZE, [EOS])
    owner.compile(ORDINARY)
    pid = helper_pid()
    del owner
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_helper_that_cannot_start_refuses_no_grammar_for_good(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(grammar_trial, "__file__", "/nowhere.py")
        with pytest.raises(WorkerUnavailableError):
            compiler.compile(ORDINARY)
    compiler.compile(ORDINARY)


@pytest.mark.parametrize("name", ["socket.socketpair", "start_child_process"])
def test_a_grammar_is_refused_for_now_without_a_descriptor_or_a_process(
    name: str, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(f"kvrelay.executors.grammar_trial.{name}", refuse)
        with pytest.raises(WorkerUnavailableError, match="Too many open files"):
            compiler.compile(ORDINARY)
    compiler.compile(ORDINARY)
