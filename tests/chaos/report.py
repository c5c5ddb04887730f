"""The result of a chaos run. Pure: records in; figures, a verdict and text out."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np
from tests.chaos.answers import Verdict
from tests.chaos.plan import ROLES, FaultKind

from kvrelay.bench.report.table import number, table

BAD = (Verdict.WRONG, Verdict.MISSING, Verdict.REPEATED, Verdict.FAILED, Verdict.HUNG)
MAX_EXAMPLES = 20
NUM_WORST = 8
KILL_GRACE_S = 2.0
MAX_BROKEN_PAUSE_S = 1.0
RANK_DEATH_S = 5.0
BEFORE_S = 1.0
"""A fault that ended at most this long before a pause may still have caused it."""


@dataclass(slots=True)
class AskedPrompt:
    """One request as measured by its client; times are monotonic seconds. ``arrivals_s`` has an entry per chunk.
    ``num_cached``: prompt tokens whose KV was found, by the answer's usage. ``worker``: that answered it, as far as the
    client knows. ``tenant``: the API key, if it is not the client's."""

    begin_s: float
    is_stream: bool
    arrivals_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: float = 0.0
    verdict: Verdict = Verdict.FAILED
    detail: str = ""
    num_cached: int = 0
    worker: str = ""
    token_ids: tuple[int, ...] = ()
    answer: tuple[int, ...] = ()
    tenant: str = ""

    def longest_pause_s(self, after_s: float, window_s: float) -> float | None:
        """The longest silence that lasted at ``after_s`` or began within ``window_s`` after it.

        None if the request was not in flight at ``after_s``. The wait for the first token counts.
        """
        if not self.begin_s <= after_s < self.end_s:
            return None
        times = [self.begin_s, *self.arrivals_s, self.end_s]
        gaps = [b - a for a, b in pairwise(times) if b > after_s and a <= after_s + window_s]
        return max(gaps)


@dataclass(frozen=True, slots=True)
class FaultRecord:
    """A fault from its injection to its end, monotonic seconds; ``recovery_s`` is None if nothing had to recover."""

    name: str
    at_s: float
    end_s: float
    recovery_s: float | None = None
    problem: str = ""
    num_reconnected: int = 0
    """Requests that lost their frontend through it and were sent again."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Count, median, P99 and maximum, in seconds."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float


@dataclass(frozen=True, slots=True)
class FaultSummary:
    """All faults of one name: the time until all workers were back, and, for the ``num_alone`` of them that overlapped
    with no other fault, how long the streams in flight were silent."""

    count: int
    num_reconnected: int
    recovery: Spread | None
    num_alone: int
    pause: Spread | None


@dataclass(frozen=True, slots=True)
class Promise:
    """A target: ``value`` should be at most ``limit``. Without a measurement ``value`` and ``is_met`` are None."""

    name: str
    limit: float
    value: float | None
    is_met: bool | None

    @classmethod
    def of(cls, name: str, limit: float, value: float | None) -> Promise:
        return cls(name, limit, value, None if value is None else value <= limit)


ChaosReport = dict[str, Any]
"""The whole run. ``num_ranks``: of each worker. ``refused`` requests got 429 or 503 with Retry-After and were sent
again. ``reconnected`` ones lost their frontend and were sent again; they also count by their outcome. The workers' own
counts, from ``remote_prefills`` to ``losses``, are lower bounds (``WorkerCounts``). The two pauses are each stream's
longest silence, including the wait for the first token: before the faults, and during them."""


def is_clean(report: ChaosReport) -> bool:
    """Nothing wrong, missing, repeated, failed, hung or leaked, and no other problem."""
    return not any(report[name] for name in (*BAD, "leaked_blocks", "problems"))


def spread(values: Iterable[float]) -> Spread | None:
    """Summarise; None for no values."""
    data = np.fromiter(values, dtype=np.float64)
    if not data.size:
        return None
    p50, p99 = np.percentile(data, [50, 99]).tolist()
    return Spread(int(data.size), round(p50, 4), round(p99, 4), round(float(data.max()), 4))


def summarise_faults(
    faults: Sequence[FaultRecord], requests: Sequence[AskedPrompt], window_s: float
) -> dict[str, FaultSummary]:
    """Per name of fault; pauses are those of the streams in flight when it struck, see ``longest_pause_s``. A pause
    counts only if no other fault lasted meanwhile: it might have another cause."""
    summaries = {}
    for name in sorted({fault.name for fault in faults}):
        own = [fault for fault in faults if fault.name == name]
        alone = [fault for fault in own if not any(_overlap(fault, other, window_s) for other in faults)]
        pauses = (r.longest_pause_s(fault.at_s, window_s) for fault in alone for r in requests if r.is_stream)
        summaries[name] = FaultSummary(
            count=len(own),
            num_reconnected=sum(fault.num_reconnected for fault in own),
            recovery=spread(fault.recovery_s for fault in own if fault.recovery_s is not None),
            num_alone=len(alone),
            pause=spread(pause for pause in pauses if pause is not None),
        )
    return summaries


def targets_of(
    verdicts: Counter[Verdict],
    leaked_blocks: int,
    faults: dict[str, FaultSummary],
    lease_ttl_s: float,
    rank_death_s: Sequence[float] = (),
) -> tuple[Promise, ...]:
    """The targets of docs/reliability.md while one worker of each role lives. A killed decode worker breaks the
    connections of its streams, so they continue at once. Prefills that a killed prefill worker had pulled may have to
    wait for its lease. ``rank_death_s``: how long each worker outlived a killed rank."""
    wrong = sum(verdicts[verdict] for verdict in (Verdict.WRONG, Verdict.MISSING, Verdict.REPEATED))
    pauses = {role: faults[f"{FaultKind.KILL} {role}"].pause for role in ROLES if f"{FaultKind.KILL} {role}" in faults}
    p99s = {role: pause.p99_s for role, pause in pauses.items() if pause is not None}
    return (
        Promise.of("wrong, missing, repeated", 0, wrong),
        Promise.of("failed", 0, verdicts[Verdict.FAILED]),
        Promise.of("hung", 0, verdicts[Verdict.HUNG]),
        Promise.of("leaked blocks", 0, leaked_blocks),
        Promise.of(
            "pause P99 after SIGKILL of a worker, s", lease_ttl_s + KILL_GRACE_S, max(p99s.values(), default=None)
        ),
        Promise.of("pause P99 after SIGKILL of a decode worker, s", MAX_BROKEN_PAUSE_S, p99s.get("decode")),
        Promise.of("end of a worker after SIGKILL of a rank, s", RANK_DEATH_S, max(rank_death_s, default=None)),
    )


def worst_pauses(
    requests: Sequence[AskedPrompt], faults: Sequence[FaultRecord], count: int = NUM_WORST
) -> tuple[str, ...]:
    """The longest silences of all streams, each with its place and the faults that lasted meanwhile."""
    pauses = []
    for record in requests:
        if record.is_stream:
            times = [record.begin_s, *record.arrivals_s, record.end_s]
            pauses.append(max((b - a, a, chunk) for chunk, (a, b) in enumerate(pairwise(times))))
    lines = []
    for length_s, begin_s, chunk in sorted(pauses, reverse=True)[:count]:
        end_s = begin_s + length_s
        names = [
            f"{f.name} ({f.at_s - begin_s:+.1f} s)" for f in faults if f.at_s < end_s and f.end_s > begin_s - BEFORE_S
        ]
        lines.append(f"{length_s:.2f} s before chunk {chunk + 1}; {', '.join(names) or 'no fault'}")
    return tuple(lines)


def _overlap(fault: FaultRecord, other: FaultRecord, window_s: float) -> bool:
    """Whether ``other`` lasts into the time in which pauses are attributed to ``fault``."""
    return other is not fault and other.at_s < fault.at_s + window_s and other.end_s > fault.at_s


def count_verdicts(requests: Sequence[AskedPrompt]) -> Counter[Verdict]:
    """The number of requests by outcome."""
    return Counter(record.verdict for record in requests)


def problems_of(requests: Sequence[AskedPrompt], faults: Sequence[FaultRecord]) -> list[str]:
    """One line per bad request and per fault with a problem; at most twenty of each."""
    bad = [f"{record.verdict}: {record.detail}" for record in requests if record.verdict in BAD]
    unhealed = [f"{fault.name}: {fault.problem}" for fault in faults if fault.problem]
    return bad[:MAX_EXAMPLES] + unhealed[:MAX_EXAMPLES]


# -- text -------------------------------------------------------------------------------------------------------------

_COLUMNS = ("count", "heal p50", "max s", "again", "alone", "streams", "pause p99", "max s")


def chaos_text(report: ChaosReport) -> str:
    """The report for a terminal of 80 columns. ``again``: requests that lost their frontend and were sent again."""
    rows = []
    for name, fault in report["faults"].items():
        healed = _cells(fault.recovery, "p50_s", "max_s")
        pause = (str(fault.pause.count) if fault.pause else "-", *_cells(fault.pause, "p99_s", "max_s"))
        rows.append((name, str(fault.count), *healed, str(fault.num_reconnected), str(fault.num_alone), *pause))
    lines = [table((f"chaos, {report['engine']}, seed {report['seed']}", *_COLUMNS), rows), ""]
    for name, value in report.items():
        if name not in ("faults", "targets", "problems", "worst_pauses"):
            lines.append(f"{name.replace('_', ' ')}: {_shown(value)}")
    lines += ["worst pauses:", *(f"  {pause}" for pause in report["worst_pauses"])]
    for target in report["targets"]:
        verdict = {True: "met", False: "missed", None: "not measured"}[target.is_met]
        lines.append(f"target {verdict}: {target.name} {number(target.value, 'g')} (at most {target.limit:g})")
    return "\n".join([*lines, *report["problems"]])


def _cells(values: Spread | None, *names: str) -> list[str]:
    return ["-" if values is None else f"{getattr(values, name):.2f}" for name in names]


def _shown(value: object) -> object:
    """A spread of seconds in one line; other values unchanged."""
    if not isinstance(value, Spread):
        return value
    return ", ".join(f"{item.name} {getattr(value, item.name):g}" for item in fields(value))
