"""Constrained decoding: which tokens a grammar allows next, for the rows of a step.

Grammars are compiled and walked by llguidance (Rust): a derivative-based lexer and an Earley parser over the
vocabulary's trie. Its state is a function of the output tokens alone, so preemption, hand-off and migration need only
those tokens. Masks are computed beside the forward pass, in a thread that holds no interpreter lock.

Compilation is bounded by a trial in another process (``grammar_trial.py``). A walk's lexer is bounded by fuel: one that
grows too large fails with a reason, at the same token on any machine. Its parser is bounded by CPU time. This module
knows no logits and no torch.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.latest import Latest
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import NO_TOKEN
from kvrelay.errors import CheckpointError, InvalidInputError, KvrelayError
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

SLOW_S = 0.001
"""Mean CPU time of a token in a sequence whose masks others do not wait for. A mask takes 0.05 ms in general."""
PATIENCE_S = 0.02
BUDGET_S, BUDGET_TOKEN_S = 1.0, 0.005
"""CPU time of one sequence's masks: altogether, and more for each token."""

_NUM_FIRST = 8
_TOKENS_AT_ONCE = 64
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
        limits: dict[str, Any] = {
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
        self._refused: Latest[bytes, str] = Latest(MAX_REFUSED)

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
                self._refused[key] = self._refused[key]  # the latest again
                raise InvalidInputError(self._refused[key])
            tokenizer = self._vocabulary()
        try:
            source = _source(grammar)
            num_bytes = self._trials.run(source)
        except InvalidInputError as exc:
            reason = f"{grammar.kind} cannot be used: {_one_line(exc.message)}"
            with self._lock:
                self._refused[key] = reason
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


class Walk:
    """One sequence's way through its grammar: the mask at its present position, once it is computed.

    ``compute`` runs on a thread of GrammarMasks, all else between two computations. Reading a token may take as long as
    a mask, so it happens there too.
    """

    def __init__(self, matcher: LLMatcher, output_token_ids: Sequence[int], *, is_awaited: bool) -> None:
        self._matcher = matcher
        self._unread = list(output_token_ids)
        self._num_tokens, self.spent_s = 0, 0.0
        self.words: Int32Array | None = None
        self.failure = ""
        """Why the sequence cannot continue."""
        self.is_asked, self.is_ready, self.is_dropped = False, False, False
        self.is_awaited = is_awaited
        """The step waits for the first mask."""

    @property
    def mean_s(self) -> float:
        """CPU time of a token. The first ones build the lexer, and count less."""
        return self.spent_s / (self._num_tokens + _NUM_FIRST)

    @property
    def is_slow(self) -> bool:
        return self.mean_s > SLOW_S

    def advance(self, token_id: int) -> None:
        self._unread.append(token_id)
        self.words = None
        self.is_asked = self.is_ready = self.is_awaited = False

    def compute(self, num_words: int) -> None:
        """Read the tokens and compute the mask after them. Tokens that do not match are an error of the mask."""
        began_s = time.thread_time()
        for first in range(0, len(self._unread), _TOKENS_AT_ONCE):  # each call holds the interpreter's lock
            self._matcher.consume_tokens(self._unread[first : first + _TOKENS_AT_ONCE])
        words = np.zeros((1, num_words), dtype=np.int32)
        fill_next_token_bitmask(self._matcher, words)
        self._num_tokens += len(self._unread)
        self._unread = []
        self.spent_s += time.thread_time() - began_s
        if self._matcher.is_error():
            self.failure = f"the grammar failed: {_one_line(self._matcher.get_error())}"
        elif self.spent_s > BUDGET_S + BUDGET_TOKEN_S * self._num_tokens:
            self.failure = (
                f"the grammar failed: its masks took {self.spent_s:.1f} s of CPU time for {self._num_tokens} tokens; "
                "use a grammar with fewer ambiguous rules"
            )
        self.words = words[0]


class GrammarMasks:
    """The matchers of the running sequences, by slot. Used from the engine's thread.

    Masks are computed on two threads: one for sequences whose masks take long on average, so that no others wait for
    those. A step waits for the masks of the other ones, for PATIENCE_S at most. A sequence whose mask is late sits out
    this step. What that changes is when its next token comes, never which one.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self.compiler = compiler
        self._vocab_size = vocab_size
        self.walks: dict[int, Walk] = {}
        self._broken: dict[int, str] = {}
        """Slots whose grammar did not compile, with the reason: the step that samples for them reports it."""
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        """For quick and for slow masks."""
        self._changed = threading.Condition()
        """Guards ``is_ready``."""

    def __bool__(self) -> bool:
        """Whether any sequence is constrained."""
        return bool(self.walks or self._broken)

    def enter(self, slot: int, sampling: SamplingParams, output_token_ids: Sequence[int]) -> None:
        """Begin a sequence in ``slot``, or continue one after these tokens of its answer."""
        self.release(slot)
        if sampling.grammar is None:
            return
        try:
            matcher = self.compiler.compile(sampling.grammar)
        except KvrelayError as exc:
            self._broken[slot] = exc.message
            return
        # The logprobs of the prompt's last token must not come twice.
        is_awaited = sampling.prompt_logprobs is not None and not output_token_ids
        self.walks[slot] = Walk(matcher, output_token_ids, is_awaited=is_awaited)

    def release(self, slot: int) -> None:
        walk = self.walks.pop(slot, None)
        if walk is not None:
            walk.is_dropped = True
        self._broken.pop(slot, None)

    def begin(self, slots: Sequence[int]) -> ComputingMasks | None:
        """Start to compute the masks of the constrained rows of ``slots``; None if no row is constrained."""
        walks = {row: self.walks[slot] for row, slot in enumerate(slots) if slot in self.walks}
        broken = {row: self._broken[slot] for row, slot in enumerate(slots) if slot in self._broken}
        if not walks and not broken:
            return None
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, "grammar-masks"), ThreadPoolExecutor(1, "slow-grammar-masks")
        asked = sorted((walk for walk in walks.values() if not walk.is_asked), key=lambda walk: walk.mean_s)
        for is_slow, thread in enumerate(self._threads):
            if chosen := [walk for walk in asked if walk.is_slow == is_slow]:
                thread.submit(self._compute, chosen)
        for walk in asked:
            walk.is_asked = True
        is_alone = len(walks) + len(broken) == len(slots)
        return ComputingMasks(walks, broken, self._vocab_size, self._changed, is_alone)

    def advance(self, slots: Sequence[int], token_ids: Sequence[int]) -> None:
        """Advance each slot's walk by its next token; NO_TOKEN: the row sat out."""
        for slot, token_id in zip(slots, token_ids, strict=True):
            walk = self.walks.get(slot)
            if walk is not None and token_id != NO_TOKEN and not walk.failure:
                walk.advance(token_id)

    def close(self) -> None:
        for slot in tuple(self.walks):
            self.release(slot)
        for thread in self._threads or ():
            thread.shutdown(cancel_futures=True)

    def _compute(self, walks: list[Walk]) -> None:
        """On one of the threads."""
        for walk in walks:
            if not walk.is_dropped:
                walk.compute(-(-self._vocab_size // _BITS))
                with self._changed:
                    walk.is_ready = True
                    self._changed.notify()


@dataclass(frozen=True, slots=True)
class ComputingMasks:
    """The masks of one step, by row, while they are being computed. ``is_alone``: no other row samples in this step."""

    walks: dict[int, Walk]
    _broken: dict[int, str]
    _vocab_size: int
    _changed: threading.Condition
    _is_alone: bool

    def result(self) -> StepMasks:
        """The masks that are ready in time. If nothing else is sampled, wait for one at least."""
        walks = self.walks.values()
        quick = [walk for walk in walks if not walk.is_slow]
        awaited = [walk for walk in walks if walk.is_awaited]
        with self._changed:
            self._changed.wait_for(lambda: all(walk.is_ready for walk in quick), PATIENCE_S)
            self._changed.wait_for(lambda: all(walk.is_ready for walk in awaited))
            if self._is_alone and not self._broken:
                self._changed.wait_for(lambda: any(walk.is_ready for walk in walks))
            ready = {row: walk for row, walk in self.walks.items() if walk.is_ready}
        words = [walk.words for walk in ready.values() if walk.words is not None]
        failures = {row: walk.failure for row, walk in ready.items() if walk.failure}
        late = [row for row in self.walks if row not in ready]
        stacked = np.stack(words) if words else np.zeros((0, -(-self._vocab_size // _BITS)), dtype=np.int32)
        return StepMasks(list(ready), stacked, self._vocab_size, self._broken | failures, late)


@dataclass(frozen=True, slots=True)
class StepMasks:
    """The masks of one step: the constrained rows (``rows`` [R]) and the tokens that each may take.

    ``failures``: rows whose grammar cannot continue, with the reason; such a row may be in ``rows`` or not. ``late``:
    other rows, which sit out this step.
    """

    rows: list[int]
    words: Int32Array
    vocab_size: int
    failures: dict[int, str]
    late: list[int]

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """[R, vocab_size]: forbidden tokens. Rows that failed forbid nothing."""
        bits = np.unpackbits(self.words.view(np.uint8), axis=1, bitorder="little", count=self.vocab_size)
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
