"""What is kept of one request: stamps and token counts per arrival, and how it ended.

An *arrival* is all that one read brought: pieces read together reached the user together, so they count as one with
all their tokens. Stamps are nanoseconds of the client's monotonic clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

INTERRUPTED = "interrupted"


class Outcome(StrEnum):
    """How a request ended. ``CUT_OFF`` means that the run ended first: neither a success nor a failure."""

    OK = "ok"
    FAILED = "failed"
    CUT_OFF = "cut_off"


class TokenSource(StrEnum):
    """Where the token counts per arrival come from: the ids themselves, running usage counts, or an estimate that
    spreads the answer's token count over its pieces of text by their length."""

    TOKEN_IDS = "token_ids"
    USAGE = "usage"
    ESTIMATED = "estimated"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. ``stamps_ns`` and ``tokens`` run side by side over its arrivals.

    ``output_tokens`` is what the server's usage says, else the sum of ``tokens``; ``prompt_tokens`` likewise, else what
    the data set said.
    """

    class_name: str
    outcome: Outcome
    sent_ns: int
    end_ns: int
    stamps_ns: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    token_source: TokenSource = TokenSource.TOKEN_IDS
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from sending to the first arrival."""
        return (self.stamps_ns[0] - self.sent_ns) / 1e9 if self.stamps_ns else None

    @property
    def e2e_s(self) -> float:
        """Seconds from sending to the last arrival."""
        return ((self.stamps_ns[-1] if self.stamps_ns else self.end_ns) - self.sent_ns) / 1e9

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token after the first arrival; None where nothing came after it."""
        later = sum(self.tokens[1:])
        return (self.stamps_ns[-1] - self.stamps_ns[0]) / 1e9 / later if later else None

    def gaps_s(self) -> npt.NDArray[np.float64]:
        """Seconds between arrivals, one per arrival after the first: the waits as a reader sees them."""
        stamps = np.asarray(self.stamps_ns, np.int64)
        return (stamps[1:] - stamps[:-1]).astype(np.float64) / 1e9

    def itl_s(self) -> npt.NDArray[np.float64]:
        """Inter-token latencies, one per token after the first arrival: a gap that brought k tokens is k times gap / k.

        So they add up to the whole time, however the server packs its tokens.
        """
        counts = np.asarray(self.tokens[1:], np.int64)
        shares = self.gaps_s() / np.maximum(counts, 1)
        return np.repeat(shares, counts)


@dataclass(frozen=True, slots=True)
class ClientLoad:
    """Whether the client was the bottleneck: its share of one core, and how late its event loop woke up at worst.

    ``reconnects`` counts requests sent a second time, because the server had closed their connection without a word.
    """

    cpu_share: float
    max_lag_s: float
    reconnects: int = 0


@dataclass(frozen=True, slots=True)
class RunResult:
    """All records, and the run's borders. Sending went on from ``start_ns`` to ``stop_ns``; a run without a time limit
    stops when its last answer is there. ``note`` says why a run ended early."""

    records: tuple[RequestRecord, ...]
    start_ns: int
    stop_ns: int
    client: ClientLoad
    note: str | None = None


def spread_tokens(text_lengths: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Split ``total`` tokens over pieces of text in proportion to their lengths, at least one for each."""
    pieces = len(text_lengths)
    if total <= pieces:
        return (1,) * pieces
    weights = np.asarray(text_lengths, np.float64)
    ends = np.cumsum(weights) / max(weights.sum(), 1.0) * (total - pieces)
    whole = np.floor(ends + 1e-9).astype(np.int64)
    whole[-1] = total - pieces
    return tuple((np.diff(whole, prepend=0) + 1).tolist())
