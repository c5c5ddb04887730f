"""Constrained decoding: which tokens a grammar allows next, for the rows of a step.

Grammars are compiled and walked by llguidance (Rust): a derivative-based lexer and an Earley parser over the
vocabulary's trie. Its state is a function of the output tokens alone, so preemption, hand-off and migration need only
those tokens. A greedy sequence needs no mask if the grammar allows the best token, so that is tried first, or if it
forces one. Masks are computed beside the forward pass, those of a step together: each call into the library takes the
interpreter's lock from the engine's thread, which needs it between any two kernels.

Compilation is bounded by a trial in another process (``grammar_trial.py``). A walk's lexer is bounded by fuel: one that
grows too large fails with a reason, at the same token on any machine. Its parser is bounded by CPU time. This module
knows no logits and no torch.
"""

from __future__ import annotations

import hashlib
import math
import queue
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import consume_token_par, fill_next_token_bitmask, fill_next_token_bitmask_par

from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.latest import Latest
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import NO_TOKEN
from kvrelay.errors import CheckpointError, InvalidInputError, KvrelayError
from kvrelay.executors.grammar_trial import GrammarTrials, TooCostlyError
from kvrelay.executors.grammar_vocabulary import MARK, grammar_vocabulary, with_marker_ids

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

Int32Array = npt.NDArray[np.int32]

COMPILE_CPU_S, COMPILE_MEMORY_BYTES = 1.0, 256 * 2**20
"""Of one grammar. 2,000 optional parts take 0.4 s."""
MAX_COMPILED, MAX_COMPILED_BYTES = 256, 256 * 2**20
MAX_REFUSED = 1024
"""Grammars that do not compile and are known by their hashes."""
COSTLY_S, MAX_COSTLY_S = 60.0, 3600.0
"""A grammar that took too long to compile is tried again after so many seconds, since the machine may have been busy;
after each further trial the pause doubles, so that one grammar takes ever less of the machine."""
INITIAL_LEXER_FUEL, STEP_LEXER_FUEL, MAX_LEXER_STATES = 500_000, 20_000, 20_000
"""At most about 2 ms per mask for the lexer, by llguidance's own figures for an idle core."""

SLOW_S = 0.001
"""Mean CPU time of a token in a sequence whose masks others do not wait for. A mask takes 0.05 ms in general."""
PATIENCE_S = 0.02
INLINE_S = 0.0002
"""If the latest masks of steady sequences took at most this long, all together, the engine's thread computes the next
ones itself: to hand them over costs it more. One mask may always take some ms, which PATIENCE_S allows as well."""
BUDGET_S, BUDGET_TOKEN_S = 1.0, 0.005
"""CPU time of one sequence's masks: altogether, and more for each token."""

MAX_GUESS_PAUSE = 64
"""Tokens after which a sequence whose best token was refused again and again tries without a mask once more."""

_NUM_FIRST = 8
_TOKENS_AT_ONCE, _MAX_AHEAD = 64, 16
"""Up to 16 forced tokens are read ahead. Of a longer text one is read at a time: each time all is written anew."""
_BITS = 32
_PENALTIES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)
"""Of the eight tokens of a mask's byte."""
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


class _Refusal(NamedTuple):
    """Why a grammar cannot be used, and until when that is believed; ``pause_s``: until its next trial."""

    reason: str
    until_s: float = math.inf
    pause_s: float = 0.0


class GrammarCompiler:
    """Compiled grammars over one vocabulary; thread-safe. ``vocab_size`` is the width of the logits.

    The first compilation builds the tokenizer's trie, which takes a second for a vocabulary of 100,000.
    """

    def __init__(
        self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int], clock: Clock | None = None
    ) -> None:
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
        self._markers: dict[str, int] = {}
        self._compiled: OrderedDict[Grammar, _Compiled] = OrderedDict()
        self._refused: Latest[bytes, _Refusal] = Latest(MAX_REFUSED)
        self._clock = clock or MonotonicClock()

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
            refusal = self._refused.get(key)
            if refusal is not None and self._clock.now() < refusal.until_s:
                self._refused[key] = refusal  # the latest again
                raise InvalidInputError(refusal.reason)
            tokenizer = self._vocabulary()
        try:
            source = _source(grammar, self._markers)
            num_bytes = self._trials.run(source)
        except InvalidInputError as exc:
            reason = f"{exc.param or grammar.kind} cannot be used: {_one_line(exc.message)}"
            known = _Refusal(reason)
            if isinstance(exc, TooCostlyError):
                pause_s = COSTLY_S if refusal is None else min(2.0 * refusal.pause_s, MAX_COSTLY_S)
                known = _Refusal(reason, self._clock.now() + pause_s, pause_s)
            with self._lock:
                self._refused[key] = known
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
                vocabulary = grammar_vocabulary(self._file, self._vocab_size)
                self._markers = vocabulary.markers
                self._tokenizer = LLTokenizer(
                    vocabulary.tokenizer, n_vocab=self._vocab_size, eos_token=self._eos_token_ids
                )
            except Exception as exc:  # the binding may raise anything for a file that it cannot use
                raise CheckpointError(f"cannot read the vocabulary in {self._file}: {exc}") from exc
        return self._tokenizer


class Walk:
    """One sequence's way through its grammar: the mask at its present position, once it is computed.

    ``compute`` and ``compute_together`` may run on a thread of GrammarMasks, all else between two computations. Reading
    a token may take as long as a mask, so it happens there too.
    """

    def __init__(self, matcher: LLMatcher, output_token_ids: Sequence[int], *, is_awaited: bool) -> None:
        self._matcher = matcher
        self._unread = tuple(output_token_ids)
        self.forced: tuple[int, ...] = ()
        """Tokens that the matcher has read ahead. ``read`` returns them; no mask can be computed before it has."""
        self._num_tokens, self.spent_s, self.latest_s = 0, 0.0, 0.0
        self._is_watched = self.is_doubted = False
        """It was among masks or guesses that took long together, so its own time must be known; its last guess was long
        by the clock, so the next is timed by the thread's CPU, which takes a system call."""
        self.words: Int32Array | None = None
        self.failure = ""
        """Why the sequence cannot continue."""
        self.is_asked, self.is_ready, self.is_dropped = False, False, False
        self.is_awaited = is_awaited
        """The step waits for the first mask."""
        self.takes_best = False
        """Its next token is the model's best one that the grammar allows: greedy, and no score is changed."""
        self._guess_pause, self._guess_at = 1, 0
        """Refused guesses in a row double the pause, in tokens."""

    @property
    def mean_s(self) -> float:
        """CPU time of a token. The first ones build the lexer, and count less."""
        return self.spent_s / (self._num_tokens + _NUM_FIRST)

    @property
    def is_slow(self) -> bool:
        return self.mean_s > SLOW_S

    @property
    def is_steady(self) -> bool:
        """Its masks were quick so far, each by itself: the next may be computed with others, or while a step waits."""
        return len(self._unread) <= 1 and self._num_tokens >= _NUM_FIRST and not self._is_watched and not self.is_slow

    @property
    def was_refused(self) -> bool:
        """Its last guess was."""
        return self._guess_pause > 1

    @property
    def may_guess(self) -> bool:
        """The model's best token is likely allowed, and to ask about one token takes less than a mask."""
        is_due = self.takes_best and self._num_tokens >= self._guess_at
        return is_due and not self.is_asked and self.latest_s <= INLINE_S and self.is_steady

    def advance(self, token_id: int) -> None:
        """``token_id`` follows. The matcher has read it if it was guessed: then no mask was computed."""
        if self.is_ready:
            self._unread += (token_id,)
        self.words = None
        self.is_asked = self.is_ready = self.is_awaited = False

    def read(self, token_id: int) -> int:
        """Read and return the token that follows if the model's best one is ``token_id``: this one, or the one that the
        grammar forces. NO_TOKEN if the grammar forbids it.

        Of several forced bytes the mask may allow one way to write them as tokens, but the matcher would read any. Else
        the mask allows what the matcher would read.
        """
        try:
            if self._unread:
                self._read_unread()
            if not self.forced and len(self._matcher.compute_ff_bytes()) > 1:
                self._read_forced()
            if self.forced:
                token_id, self.forced = self.forced[0], self.forced[1:]
                return token_id
            if self._matcher.try_consume_tokens([token_id]):
                self._num_tokens += 1
                self._guess_pause = 1
                return token_id
        except BaseException as exc:  # noqa: BLE001 - as in compute
            self._fail(str(exc))
            return NO_TOKEN
        self._guess_pause = min(2 * self._guess_pause, MAX_GUESS_PAUSE)
        self._guess_at = self._num_tokens + self._guess_pause
        return NO_TOKEN

    def _read_forced(self) -> None:
        """Read the tokens that the masks would force one after the other.

        To write forced bytes as tokens takes the library much longer than to read a token, but not right after it has
        done so. It is asked again after each token: what precedes bytes may change how they are written. A last single
        byte is left to a guess, which takes less.
        """
        forced = self._matcher.compute_ff_tokens()
        while forced and self._matcher.consume_token(forced[0]):
            self.forced += (forced[0],)
            is_more = 1 < len(forced) <= _MAX_AHEAD and len(self._matcher.compute_ff_bytes()) > 1
            forced = self._matcher.compute_ff_tokens() if is_more else []
        self._num_tokens += len(self.forced)

    def _read_unread(self) -> None:
        for first in range(0, len(self._unread), _TOKENS_AT_ONCE):  # each call holds the interpreter's lock
            self._matcher.consume_tokens(list(self._unread[first : first + _TOKENS_AT_ONCE]))
        self._num_tokens += len(self._unread)
        self._unread = ()

    def compute(self, num_words: int) -> None:
        """Read the tokens and compute the mask after them. Tokens that do not match are an error of the mask."""
        began_s = time.thread_time()
        words = np.empty((1, num_words), dtype=np.int32)
        try:
            self._read_unread()
            fill_next_token_bitmask(self._matcher, words)
        except BaseException as exc:  # noqa: BLE001 - a panic of the library is no Exception; it ends this sequence alone
            self._fail(str(exc))
        self._finish(words[0], time.thread_time() - began_s)

    @staticmethod
    def compute_together(walks: Sequence[Walk], num_words: int, executor: LLExecutor) -> None:
        """``compute`` of steady walks in two calls, both without the interpreter's lock.

        Of the time only the sum is known, and that of the clock. Each walk is charged its share, but never so much that
        it becomes slow or ends. If that does not cover it, each is measured by itself from now on.
        """
        began_s = time.perf_counter()
        words = np.empty((len(walks), num_words), dtype=np.int32)
        try:
            consume_token_par(executor, [(walk._matcher, walk._unread[0]) for walk in walks if walk._unread])
            fill_next_token_bitmask_par(executor, [(walk._matcher, row) for row, walk in enumerate(walks)], words)
        except BaseException as exc:  # noqa: BLE001 - as above; which of them it was, is unknown
            for walk in walks:
                walk._fail(str(exc))
        elapsed_s = time.perf_counter() - began_s
        Walk.watch(walks, is_long=_is_long(elapsed_s, len(walks)), is_certain=True)
        for walk, row in zip(walks, words):
            walk._finish(row, min(elapsed_s / len(walks), SLOW_S))

    @staticmethod
    def watch(walks: Collection[Walk], *, is_long: bool, is_certain: bool) -> None:
        """Watch the walks if their time together was long; only doubt them if the thread may have been preempted."""
        for walk in walks:
            walk._is_watched, walk.is_doubted = is_long and is_certain, is_long and not is_certain

    def _finish(self, words: Int32Array, seconds: float) -> None:
        self._num_tokens += len(self._unread)
        self._unread = ()
        self.spent_s += seconds
        self.latest_s = seconds
        if not self.failure and self._matcher.is_error():
            self._fail(self._matcher.get_error())
        elif self.spent_s > BUDGET_S + BUDGET_TOKEN_S * self._num_tokens:
            self.failure = (
                f"the grammar failed: its masks took {self.spent_s:.1f} s of CPU time for {self._num_tokens} tokens; "
                "use a grammar with fewer ambiguous rules and shorter constants"
            )
        if self.failure:
            words.fill(-1)
        self.words = words
        self.is_ready = True

    def _fail(self, reason: str) -> None:
        self.failure = f"the grammar failed: {_one_line(reason)}"


class GrammarMasks:
    """The matchers of the running sequences, by slot. Used from the engine's thread.

    Masks are computed on two threads: one for sequences whose masks take long on average, so that no others wait for
    those. If the others' take next to no time, the engine's thread computes them itself. A step waits for the masks of
    the other ones, for PATIENCE_S at most. A sequence whose mask is late sits out
    this step. What that changes is when its next token comes, never which one.
    """

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self.compiler = compiler
        self._vocab_size, self._num_words = vocab_size, -(-vocab_size // _BITS)
        self.walks: dict[int, Walk] = {}
        self._broken: dict[int, str] = {}
        """Slots whose grammar did not compile, with the reason: the step that samples for them reports it."""
        self._changed = threading.Condition()
        """Notified when masks are ready that were not."""
        self._threads: tuple[_MaskThread, ...] | None = None
        """For quick and for slow masks."""
        self._latest: ComputingMasks | None = None
        """Of the latest step, if no sequence has entered or left since."""

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
        walk = self.walks[slot] = Walk(matcher, output_token_ids, is_awaited=is_awaited)
        is_changed = sampling.needs_penalties or bool(sampling.logit_bias) or sampling.min_tokens > 0
        walk.takes_best = sampling.is_greedy and not is_changed

    def release(self, slot: int) -> None:
        self._latest = None
        walk = self.walks.pop(slot, None)
        if walk is not None:
            walk.is_dropped = True
        self._broken.pop(slot, None)

    def begin(self, slots: Sequence[int], *, may_guess: bool = False) -> ComputingMasks | None:
        """Start to compute the masks of the constrained rows of ``slots``; None if no row is constrained.

        ``may_guess``: the caller can choose a token without a mask first, and asks ``refused`` about it.
        """
        latest = self._latest
        if may_guess and latest is not None and latest.is_settled and latest.slots == slots:
            return latest
        walks = {row: self.walks[slot] for row, slot in enumerate(slots) if slot in self.walks}
        guessed: dict[int, Walk] = {}
        if may_guess:
            # Masks of refused guesses are computed on this thread: only if all together take next to no time.
            # A walk that obeys needs none.
            is_quick = sum([walk.latest_s for walk in walks.values() if walk.was_refused]) <= INLINE_S
            eager = {row for row, walk in walks.items() if walk.may_guess and (is_quick or not walk.was_refused)}
            guessed = {row: walk for row, walk in walks.items() if walk.forced or row in eager}
            walks = {row: walk for row, walk in walks.items() if row not in guessed}
        broken = {row: self._broken[slot] for row, slot in enumerate(slots) if slot in self._broken}
        if not walks and not guessed and not broken:
            return None
        if walks:
            self._ask([walk for walk in walks.values() if not walk.is_asked])
        is_alone = len(walks) + len(broken) == len(slots)
        is_doubted = any([walk.is_doubted for walk in guessed.values()])
        widths = self._vocab_size, self._num_words
        self._latest = ComputingMasks(slots, walks, guessed, broken, *widths, self._changed, is_alone, is_doubted)
        return self._latest

    def _ask(self, walks: Sequence[Walk]) -> None:
        for walk in walks:
            walk.is_asked = True
        if sum([walk.latest_s for walk in walks]) <= INLINE_S and all([walk.is_steady for walk in walks]):
            for walk in walks:
                walk.compute(self._num_words)
            return
        if self._threads is None:
            self._threads = tuple(
                _MaskThread(name, self._num_words, self._changed) for name in ("grammar-masks", "slow-grammar-masks")
            )
        slow = [walk for walk in walks if walk.is_slow]
        quick = [walk for walk in walks if not walk.is_slow] if slow else list(walks)
        for thread, chosen in zip(self._threads, (quick, slow)):
            if chosen:
                thread.ask(chosen)

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
            thread.close()
        self._threads = None


class _MaskThread:
    """Computes masks in the order in which they are asked for. ``changed`` is notified whenever some are ready."""

    def __init__(self, name: str, num_words: int, changed: threading.Condition) -> None:
        self._num_words, self._changed = num_words, changed
        self._asked: queue.SimpleQueue[list[Walk] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, walks: list[Walk]) -> None:
        self._asked.put(walks)

    def close(self) -> None:
        """Return when no mask is computed any more. Walks that wait are dropped."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        executor = LLExecutor(1)
        while (walks := self._asked.get()) is not None:
            steady = [walk for walk in walks if walk.is_steady and not walk.is_dropped]
            if len(steady) > 1:
                Walk.compute_together(steady, self._num_words, executor)
                self._tell()
            left = [walk for walk in walks if not walk.is_ready]
            for walk in sorted(left, key=lambda walk: walk.mean_s):
                if not walk.is_dropped:
                    walk.compute(self._num_words)
                    self._tell()

    def _tell(self) -> None:
        with self._changed:
            self._changed.notify()


class ComputingMasks(msgspec.Struct):
    """The masks of one step, by row, while they are being computed. ``is_alone``: no other row samples in this step.
    ``guessed``: rows whose tokens are chosen without masks. ``is_settled``: all rows guessed, and no guess was refused
    or took long, so a step of the same sequences begins likewise."""

    slots: Sequence[int]
    walks: dict[int, Walk]
    guessed: dict[int, Walk]
    _broken: dict[int, str]
    _vocab_size: int
    _num_words: int
    _changed: threading.Condition
    _is_alone: bool
    _is_doubted: bool
    is_settled: bool = False

    def result(self) -> StepMasks | None:
        """The masks that are ready in time; None if all rows guess. If nothing else is sampled, wait for one."""
        if not self.walks and not self._broken:
            return None
        if not all([walk.is_ready for walk in self.walks.values()]):
            self._wait()
        ready = {row: walk for row, walk in self.walks.items() if walk.is_ready}
        late = [row for row in self.walks if row not in ready]
        return self._stacked(ready, self._broken, late)

    def refused(self, token_ids: npt.NDArray[np.int64]) -> StepMasks | None:
        """The masks of the guessed rows that may not, or not surely, take these tokens; None if there are none. The
        others' walks have read theirs, and forced tokens are put in their places."""
        if not self.guessed:
            return None
        best: list[int] = token_ids.tolist()
        refused: dict[int, Walk] = {}
        clock = time.thread_time if self._is_doubted else time.perf_counter
        began_s = clock()
        for row, walk in self.guessed.items():
            token_id = walk.read(best[row])
            if token_id == NO_TOKEN:
                refused[row] = walk
            elif token_id != best[row]:
                token_ids[row] = token_id
        # A guess is not charged: one that is not long takes less than its token adds to the budget.
        is_long = _is_long(clock() - began_s, len(self.guessed))
        if is_long or self._is_doubted:
            Walk.watch(self.guessed.values(), is_long=is_long, is_certain=self._is_doubted)
        is_steady = not (refused or self.walks or self._broken or self._is_doubted or is_long)
        self.is_settled = is_steady and (self.is_settled or all([walk.may_guess for walk in self.guessed.values()]))
        for walk in refused.values():
            walk.compute(self._num_words)
        return self._stacked(refused, {}, []) if refused else None

    def _stacked(self, ready: dict[int, Walk], broken: dict[int, str], late: list[int]) -> StepMasks:
        failures = {row: walk.failure for row, walk in ready.items() if walk.failure}
        words = {row: walk.words for row, walk in ready.items() if walk.words is not None}
        stacked = np.concatenate(tuple(words.values())) if words else np.zeros(0, dtype=np.int32)
        return StepMasks(list(words), stacked.reshape(-1, self._num_words), self._vocab_size, broken | failures, late)

    def _wait(self) -> None:
        walks = self.walks.values()
        quick = [walk for walk in walks if not walk.is_slow]
        awaited = [walk for walk in walks if walk.is_awaited]
        with self._changed:
            self._changed.wait_for(lambda: all(walk.is_ready for walk in quick), PATIENCE_S)
            self._changed.wait_for(lambda: all(walk.is_ready for walk in awaited))
            if self._is_alone and not self._broken:
                self._changed.wait_for(lambda: any(walk.is_ready for walk in walks))


class StepMasks(msgspec.Struct, frozen=True):
    """The masks of one step: the constrained rows (``rows`` [R]) and the tokens that each may take (``words``).

    ``failures``: rows whose grammar cannot continue, with the reason; such a row may be in ``rows``, and then may take
    any token. ``late``: other rows, which sit out this step.
    """

    rows: list[int]
    words: Int32Array
    vocab_size: int
    failures: dict[int, str]
    late: list[int]

    def forbidden(self) -> npt.NDArray[np.bool_]:
        """[R, vocab_size]: forbidden tokens."""
        bits = np.unpackbits(~self.words.view(np.uint8), axis=1, bitorder="little", count=self.vocab_size)
        return bits.view(np.bool_)

    def penalties(self) -> npt.NDArray[np.float32]:
        """[R, vocab_size]: what to add to a token's score, 0 or -inf. The caller may change the array."""
        scores = _PENALTIES.take(self.words.view(np.uint8), axis=0)
        # The width is named, since no row tells it if all masks are late.
        return scores.reshape(len(self.rows), _BITS * self.words.shape[1])[:, : self.vocab_size]


def _source(grammar: Grammar, markers: Mapping[str, int]) -> str:
    """llguidance's form of the grammar. Raises InvalidInputError for a schema that is not JSON."""
    if grammar.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(grammar.source))
    if grammar.kind is GrammarKind.LARK:
        return str(LLMatcher.grammar_from_lark(with_marker_ids(grammar.source, markers)))
    try:
        return str(LLMatcher.grammar_from_json_schema(grammar.source, overrides=_JSON_OPTIONS))
    except ValueError as exc:
        raise InvalidInputError(str(exc)) from exc


def _is_long(seconds: float, num_walks: int) -> bool:
    """Of masks or guesses of so many walks."""
    return seconds > min(SLOW_S * num_walks, PATIENCE_S)


def _one_line(message: str) -> str:
    message = message.replace("<non-verbose/>", "").replace(MARK, "").replace("NoExtensionBias", "no text satisfies it")
    return " ".join(message.partition(". Enable ")[0].split())[:300]  # the options are not the client's
