"""Constrained decoding: which tokens a grammar allows next, for the rows of a step.

Grammars are compiled and walked by llguidance (Rust): a derivative-based lexer and an Earley parser over the
vocabulary's trie. Its state is a function of the output tokens alone, so preemption, hand-off and migration need only
those tokens. Masks are computed beside the forward pass, in a thread that holds no interpreter lock.

Compilation is bounded by a trial in another process (``grammar_trial.py``). Walking is bounded by fuel: a grammar that
grows too large fails with a reason, at the same token on any machine. This module knows no logits and no torch.
"""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.errors import CheckpointError, InvalidInputError
from kvrelay.executors.grammar_trial import GrammarTrials

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Int32Array = npt.NDArray[np.int32]

COMPILE_CPU_S, COMPILE_MEMORY_BYTES = 1.0, 256 * 2**20
"""Of one grammar. 2,000 optional parts take 0.4 s."""
MAX_COMPILED, MAX_COMPILED_BYTES = 256, 256 * 2**20
MAX_REFUSED = 1024
"""Grammars that do not compile and are known by their hashes."""
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL, MAX_LEXER_STATES = 500_000, 20_000, 20_000
"""At most about 2 ms per mask for the lexer, by llguidance's own figures for an idle core."""

_BITS = 32
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": True, "whitespace_pattern": r"(\n[ \t]{0,16}|[ ])?"}
"""Enough for indented documents, but not for a model that writes spaces without end."""


class _Compiled:
    """An entry of the cache: a matcher at the start, about how much memory it takes, and who holds the grammar."""

    def __init__(self, matcher: LLMatcher, num_bytes: int) -> None:
        self.matcher = matcher
        self.num_bytes = num_bytes
        self._holders: list[weakref.ref[Grammar]] = []

    @property
    def is_held(self) -> bool:
        return any(holder() is not None for holder in self._holders)

    def hold(self, grammar: Grammar) -> None:
        """Holders are objects, not values: equal grammars of two requests are two."""
        others = [holder for holder in self._holders if holder() is not None and holder() is not grammar]
        self._holders = [*others, weakref.ref(grammar)]


class GrammarCompiler:
    """Compiled grammars over one vocabulary; thread-safe. ``vocab_size`` is the width of the logits.

    The first compilation builds the tokenizer's trie, which takes a second for a vocabulary of 100,000.
    """

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        limits = {
            "initial_lexer_fuel": INITIAL_LEXER_FUEL,
            "step_lexer_fuel": STEP_LEXER_FUEL,
            "max_lexer_states": MAX_LEXER_STATES,
            "verbose_errors": False,
        }
        self._limits = LLParserLimits(**limits)
        self._trials = GrammarTrials(
            {
                "tokenizer_file": str(tokenizer_file.absolute()),
                "vocab_size": vocab_size,
                "eos_token_ids": self._eos_token_ids,
                "limits": limits,
                "cpu_s": COMPILE_CPU_S,
                "memory_bytes": COMPILE_MEMORY_BYTES,
            }
        )
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._refused: OrderedDict[bytes, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"GrammarCompiler({len(self._compiled)} compiled)"

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the grammar's start. A compiled grammar is cached, and kept at least as long as the object
        ``grammar`` lives: a preempted request must not compile again when it returns, on the engine's thread. (In a
        rank, which gets a copy of each request's grammar, only the cache's size keeps it.)

        Raises InvalidInputError for a grammar that does not compile, cannot be satisfied or is too complex;
        CheckpointError if the vocabulary cannot be read; WorkerUnavailableError if nothing can be compiled now.
        """
        grammar.check()
        with self._lock:
            found = self._compiled.get(grammar)
            if found is not None:
                self._compiled.move_to_end(grammar)
                found.hold(grammar)
                return found.matcher.deep_copy()
            key = hashlib.blake2b(f"{grammar.kind} {grammar.source}".encode(errors="surrogatepass")).digest()
            if key in self._refused:
                self._refused.move_to_end(key)
                raise InvalidInputError(self._refused[key])
            tokenizer = self._vocabulary()
        try:
            source = _source(grammar)
            num_bytes = self._trials.run(source)
        except InvalidInputError as exc:
            reason = f"{grammar.kind} cannot be used: {_one_line(exc.message)}"
            with self._lock:
                self._refused[key] = reason
                if len(self._refused) > MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise InvalidInputError(reason) from exc
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=self._limits)
        matcher.compute_bitmask()
        with self._lock:
            # The key is another object, which keeps no holder alive.
            own_key = Grammar(grammar.kind, grammar.source)
            entry = self._compiled.setdefault(own_key, _Compiled(matcher, num_bytes))
            entry.hold(grammar)
            self._evict()
        return matcher.deep_copy()

    def close(self) -> None:
        """End compilations that are under way; nothing is compiled any more. Idempotent."""
        self._trials.close()

    def _evict(self) -> None:
        """The least recently used entries go, except those that a request holds."""
        num_bytes = sum(entry.num_bytes for entry in self._compiled.values())
        for grammar, entry in tuple(self._compiled.items()):
            if len(self._compiled) <= MAX_COMPILED and num_bytes <= MAX_COMPILED_BYTES:
                return
            if not entry.is_held:
                num_bytes -= entry.num_bytes
                del self._compiled[grammar]

    def _vocabulary(self) -> LLTokenizer:
        if self._tokenizer is None:
            if not self._eos_token_ids:
                raise InvalidInputError("constrained answers need a model with an end-of-sequence token")
            try:
                self._tokenizer = LLTokenizer(str(self._file), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
            except Exception as exc:  # the binding may raise anything for a file that it cannot use
                raise CheckpointError(f"cannot read the vocabulary in {self._file}: {exc}") from exc
        return self._tokenizer


class GrammarMasks:
    """The matchers of the running sequences, by slot. Used from the engine's thread."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self.compiler = compiler
        self._vocab_size = vocab_size
        self._matchers: dict[int, LLMatcher] = {}
        self._broken: dict[int, str] = {}
        """Slots whose grammar did not compile, with the reason: the step that samples for them reports it."""
        self._executor: LLExecutor | None = None
        self._thread: ThreadPoolExecutor | None = None

    def __bool__(self) -> bool:
        """Whether any sequence is constrained."""
        return bool(self._matchers or self._broken)

    def enter(self, slot: int, grammar: Grammar | None, output_token_ids: Sequence[int]) -> None:
        """Begin a sequence in ``slot``, or continue one after these tokens of its answer."""
        self.release(slot)
        if grammar is None:
            return
        try:
            matcher = self.compiler.compile(grammar)
        except InvalidInputError as exc:
            self._broken[slot] = exc.message
            return
        # Tokens that do not match put the matcher into an error, which its next mask reports.
        matcher.consume_tokens(list(output_token_ids))
        self._matchers[slot] = matcher

    def release(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._broken.pop(slot, None)

    def begin(self, slots: Sequence[int]) -> Future[StepMasks] | None:
        """Start to compute the masks of the constrained rows of ``slots``; None if no row is constrained."""
        rows = [row for row, slot in enumerate(slots) if slot in self._matchers]
        broken = {row: self._broken[slot] for row, slot in enumerate(slots) if slot in self._broken}
        if not rows and not broken:
            return None
        if self._thread is None:
            self._executor = LLExecutor(num_threads=1)
            self._thread = ThreadPoolExecutor(1, "grammar-masks")
        matchers = [self._matchers[slots[row]] for row in rows]
        return self._thread.submit(self._compute, rows, matchers, broken)

    def advance(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Advance each slot's matcher by its next token."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            matcher = self._matchers.get(slot)
            if matcher is not None:
                matcher.consume_token(token_id)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

    def _compute(self, rows: list[int], matchers: list[LLMatcher], broken: dict[int, str]) -> StepMasks:
        words = np.zeros((len(rows), -(-self._vocab_size // _BITS)), dtype=np.int32)
        assert self._executor is not None
        if matchers:
            fill_next_token_bitmask_par(self._executor, [(matcher, row) for row, matcher in enumerate(matchers)], words)
        failures = {
            row: f"the grammar failed: {_one_line(matcher.get_error())}"
            for row, matcher in zip(rows, matchers)
            if matcher.is_error()
        }
        return StepMasks(rows, words, self._vocab_size, broken | failures)


class StepMasks:
    """The masks of one step: the constrained rows (``rows`` [R]) and the tokens that each may take.

    ``failures``: rows whose grammar cannot continue, with the reason; such a row may be in ``rows`` or not.
    """

    def __init__(self, rows: list[int], words: Int32Array, vocab_size: int, failures: dict[int, str]) -> None:
        self.rows = rows
        self.failures = failures
        self._words = words
        self._vocab_size = vocab_size

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """[R, vocab_size]: forbidden tokens. Rows that failed forbid nothing."""
        bits = np.unpackbits(self._words.view(np.uint8), axis=1, bitorder="little", count=self._vocab_size)
        result: npt.NDArray[np.bool_] = bits == 0
        for number, row in enumerate(self.rows):
            if row in self.failures:
                result[number] = False
        return result


def _source(grammar: Grammar) -> str:
    """llguidance's form of the grammar. Raises InvalidInputError for a schema that is not JSON."""
    if grammar.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind is GrammarKind.LARK:
        return str(LLMatcher.grammar_from_lark(grammar.source))
    try:
        return str(LLMatcher.grammar_from_json_schema(grammar.source, overrides=_JSON_OPTIONS))
    except ValueError as exc:
        raise InvalidInputError(str(exc)) from exc


def _one_line(message: str) -> str:
    return " ".join(message.split())[:300]
