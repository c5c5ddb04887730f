"""How long sessions pause between two turns, and how likely a paused one returns soon. Pure; learned while serving.

An answer's end opens a *pause*. The next request whose prompt begins with that answer's prompt ends it: a session is
seen by its prefix, and needs no field. Pauses are taken as log-normal, apart for each kind: the tool that was called,
or "" if none is known. Some pauses never end, so each kind also has the share that does. A session that is slower or
faster than its kind shifts its own expectation.

Estimates order evictions and nothing else: a wrong one costs a prefill, never an answer.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec

from kvrelay.core.clock import Clock

PRIOR_MEDIAN_S, PRIOR_SIGMA, PRIOR_SAMPLES = 5.0, 2.0, 2.0
"""So wide a log-normal expects less of a pause the longer it lasts. So kinds of which nothing is known are evicted by
recency."""
PRIOR_SHARE = 0.5
WINDOW = 64.0
"""Samples over which a fit is a mean."""
MIN_SIGMA = 0.3
NARROW_SIGMA = 1.2
"""Below it the chance of a return first rises with the time that has passed."""
MIN_RETURNED = 32
"""Pauses of an unknown kind may be anything: so many returns are evidence that they are alike."""
GONE_SIGMAS, MIN_GONE_S = 3.0, 30.0
"""A pause that lasts this much longer than its kind's counts as one that never ends."""
SESSION_PRIOR = 3.0
"""Turns of the kind that count as much as the session's own."""
MAX_SHIFT = 3.0
MIN_PROMISE_S, MAX_PROMISE_S = 0.01, 86400.0
MAX_PAUSES = 1 << 16
MAX_PAUSES_OF_KEY = 1 << 13
"""Of one API key. The oldest is forgotten: its session then looks like a new one."""
MAX_KINDS, MAX_KINDS_OF_KEY = 1024, 16
"""Further kinds of a key count as its unknown one; of further keys nothing is learned."""
NUM_GONE_CHECKS = 2
"""Per pause that begins: the table is swept as fast as it fills."""


class PauseFit:
    """The pauses of one kind."""

    def __init__(self, median_s: float = PRIOR_MEDIAN_S, *, is_named: bool = False, learns: bool = True) -> None:
        self.mean, self.variance, self.sigma = math.log(median_s), PRIOR_SIGMA**2, PRIOR_SIGMA
        """Of the logarithm of the seconds."""
        self.share = PRIOR_SHARE
        """Of pauses that end."""
        self.is_named = is_named
        self._learns = learns
        self._num_returned = self._num_ended = PRIOR_SAMPLES

    def __repr__(self) -> str:
        return f"PauseFit({math.exp(self.mean):.3g} s, sigma {self.sigma:.2f}, {self.share:.0%} return)"

    @property
    def is_narrow(self) -> bool:
        """Whether the newest pause may be the one that ends last."""
        return self.sigma < NARROW_SIGMA and (self.is_named or self._num_returned >= MIN_RETURNED)

    def returned(self, seconds: float) -> None:
        """A pause has ended."""
        if not self._learns:
            return
        weight = 1.0 / (self._num_returned + 1.0)
        self._num_returned = min(self._num_returned + 1.0, WINDOW)
        off = math.log(min(max(seconds, 1e-3), 1e6)) - self.mean
        self.mean += weight * off
        self.variance = (1.0 - weight) * (self.variance + weight * off * off)
        self.sigma = max(math.sqrt(self.variance), MIN_SIGMA)
        self._has_ended(1.0)

    def gone(self) -> None:
        """A pause will not end, as it seems."""
        if self._learns:
            self._has_ended(0.0)

    def _has_ended(self, value: float) -> None:
        self.share += (value - self.share) / (self._num_ended + 1.0)
        self._num_ended = min(self._num_ended + 1.0, WINDOW)

    def chance(self, elapsed_s: float, within_s: float, shift: float = 0.0) -> float:
        """That a pause which has lasted ``elapsed_s`` ends within the next ``within_s``, 0 to 1."""
        now, then = self._lasting(elapsed_s, shift), self._lasting(elapsed_s + within_s, shift)
        return self.share * (now - then) / max(1.0 - self.share * (1.0 - now), 1e-9)

    def _lasting(self, seconds: float, shift: float) -> float:
        """The share of those which end that last longer."""
        if seconds <= 0.0:
            return 1.0
        return 0.5 * math.erfc((math.log(seconds) - self.mean - shift) / (self.sigma * math.sqrt(2.0)))


class _Over(PauseFit):
    """Of pauses that have ended: the next turn waits for the blocks, or has taken those that it repeats."""

    def __init__(self, share: float) -> None:
        super().__init__(learns=False)
        self.share = share

    def chance(self, elapsed_s: float, within_s: float, shift: float = 0.0) -> float:
        return self.share


class Session(msgspec.Struct, eq=False):
    """What is known of one session: how much longer than their kinds its pauses were, in logarithms."""

    num_turns: int = 0
    sum_off: float = 0.0

    @property
    def shift(self) -> float:
        return min(max(self.sum_off / (self.num_turns + SESSION_PRIOR), -MAX_SHIFT), MAX_SHIFT)


class Pause(msgspec.Struct, eq=False):
    """Since an answer has ended. ``marks``: hashes of prefixes by which the next turn is seen, with their lengths in
    blocks. ``num_repeated``: of these, what the next turn repeats. ``is_half``: the answer is another worker's, which
    counts the pause, or there is none, after a prefetch."""

    request_id: str
    tenant: str
    began_s: float
    marks: Mapping[int, int]
    session: Session
    fit: PauseFit
    is_half: bool = False
    num_repeated: int = 0
    on_changed: Callable[[], None] | None = None
    """Called when ``fit`` has changed."""

    def is_now(self, fit: PauseFit) -> None:
        """Something has become known of it."""
        self.fit = fit
        if self.on_changed is not None:
            self.on_changed()


class PauseCounts(msgspec.Struct):
    """``num_named``: for tools; ``num_returned``: that ended; ``num_gone``: that seem never to end; ``num_forgotten``:
    the table was full."""

    num_begun: int = 0
    num_named: int = 0
    num_returned: int = 0
    num_gone: int = 0
    num_forgotten: int = 0
    returned_tokens: int = 0
    """Prompt tokens of sessions that returned, as far as an earlier turn had them."""
    pool_tokens: int = 0
    """Of these, found in the pool."""
    stored_tokens: Counter[str] = msgspec.field(default_factory=Counter)
    """Found in tiers or at other workers, by medium."""
    saved_s: float = 0.0
    """What computing the tokens that were found would have taken."""
    num_missed: int = 0
    """Returns of which the pool had lost a part: their blocks gave way to others that seemed worth more."""


class Pauses:
    """The open pauses of one engine, and what it has learned of those that ended."""

    def __init__(self, clock: Clock) -> None:
        self.counts, self.num_paused = PauseCounts(), 0
        """Since the start, and of those that may return; halves are counted elsewhere."""
        self._clock = clock
        self._open: OrderedDict[str, Pause] = OrderedDict()
        """By the request that has ended, the oldest first."""
        self._expected: OrderedDict[str, Pause] = OrderedDict()
        """Of these, those that are not counted as gone."""
        self._of_key: dict[str, OrderedDict[str, Pause]] = {}
        self._by_mark: dict[int, Pause] = {}
        self.prior = PauseFit(learns=False)
        """Of pauses about which nothing is known."""
        self.fits: dict[tuple[str, str], PauseFit] = {}
        """By key and kind."""
        self._wanted, self._left = _Over(1.0), _Over(0.0)
        self._num_kinds: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Pauses({len(self._open)} open, {len(self.fits)} kinds)"

    def begin(
        self, request_id: str, tenant: str, marks: Mapping[int, int], session: Session, *, is_half: bool = False
    ) -> Pause:
        """An answer has ended."""
        pause = Pause(request_id, tenant, self._clock.now(), marks, session, self._fit(tenant, ""), is_half)
        self.num_paused += not is_half
        self._drop(self._open.get(request_id))
        of_key = self._of_key.setdefault(tenant, OrderedDict())
        self._open[request_id] = self._expected[request_id] = of_key[request_id] = pause
        if len(of_key) > MAX_PAUSES_OF_KEY or len(self._open) > MAX_PAUSES:
            self.counts.num_forgotten += 1
            self._drop(next(iter((of_key if len(of_key) > MAX_PAUSES_OF_KEY else self._open).values())))
        for mark in pause.marks:
            self._by_mark[mark] = pause
        self.counts.num_begun += not is_half
        self._sweep()
        return pause

    def named(self, request_id: str, kind: str, within_s: float = 0.0) -> Pause | None:
        """The pause after this request is of this kind. ``within_s``: the client promises to be back by then. How far
        promises of such a length are kept is learned like any kind. What is no such time promises nothing. None: it
        has ended."""
        pause = self._open.get(request_id)
        if pause is None:
            return None
        median_s = PRIOR_MEDIAN_S
        self.counts.num_named += bool(kind) and not pause.is_half
        if MIN_PROMISE_S <= within_s <= MAX_PROMISE_S:
            kind, median_s = f"{kind} within {2.0 ** round(math.log2(within_s)):g} s", within_s / 2
        pause.is_now(self._fit(pause.tenant, kind, median_s))
        return pause

    def over(self, request_id: str) -> None:
        """The session of this request will not continue. If it does, it is seen all the same."""
        pause = self._open.get(request_id)
        if pause is not None:
            self._expect_no_more(pause)
            pause.is_now(self._left)

    def end(self, sequence_hashes: Sequence[int], tenant: str, *, is_half: bool = False) -> Pause | None:
        """The pause that a prompt with these blocks ends, if any: the latest of its session."""
        if not self._by_mark:
            return None
        mark = next(filter(self._by_mark.__contains__, reversed(sequence_hashes)), None)
        if mark is None:
            return None
        pause = self._by_mark[mark]
        # Keys without caches of their own share prefixes, but learn nothing from each other.
        if pause.tenant != tenant:
            return None
        seconds = max(self._clock.now() - pause.began_s, 0.0)
        pause.session.num_turns += 1
        pause.session.sum_off += math.log(max(seconds, 1e-3)) - pause.fit.mean
        pause.fit.returned(seconds)
        self.counts.num_returned += not is_half
        self._drop(pause)
        pause.num_repeated = pause.marks[mark]
        pause.is_now(self._wanted)
        return pause

    def resumed(self, pause: Pause, *, is_served: bool) -> None:
        """The next turn of an ended pause has taken the blocks that it repeats; others are of no use. Not
        ``is_served``: it was aborted before."""
        pause.is_now(self._left if is_served else self.prior)

    def _fit(self, tenant: str, kind: str, median_s: float = PRIOR_MEDIAN_S) -> PauseFit:
        fit = self.fits.get((tenant, kind))
        if fit is not None:
            return fit
        if len(self.fits) >= MAX_KINDS or self._num_kinds.get(tenant, 0) >= MAX_KINDS_OF_KEY:
            return self.fits.get((tenant, ""), self.prior)
        self._num_kinds[tenant] = self._num_kinds.get(tenant, 0) + 1
        self.fits[tenant, kind] = fit = PauseFit(median_s, is_named=bool(kind))
        return fit

    def _sweep(self) -> None:
        """Count the oldest as gone if they are overdue. They stay, in case they return all the same."""
        now_s = self._clock.now()
        for pause in list(islice(self._expected.values(), NUM_GONE_CHECKS)):
            longest_s = math.exp(min(pause.fit.mean + GONE_SIGMAS * pause.fit.sigma, 20.0))
            if now_s - pause.began_s > max(longest_s, MIN_GONE_S):
                self._expect_no_more(pause)
                pause.fit.gone()
                self.counts.num_gone += not pause.is_half

    def _drop(self, pause: Pause | None) -> None:
        if pause is None:
            return
        self._expect_no_more(pause)
        of_key = self._of_key[pause.tenant]
        del self._open[pause.request_id], of_key[pause.request_id]
        if not of_key:
            del self._of_key[pause.tenant]
        for mark in pause.marks:
            if self._by_mark.get(mark) is pause:
                del self._by_mark[mark]

    def _expect_no_more(self, pause: Pause) -> None:
        if self._expected.pop(pause.request_id, None) is not None:
            self.num_paused -= not pause.is_half
