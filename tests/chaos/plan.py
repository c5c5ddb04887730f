"""The schedule of a chaos run: which fault, when, against which role. Pure; the same seed gives the same schedule.

Every kind occurs once before any occurs twice, in a new random order for each round. Knows nothing of processes.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from kvrelay.errors import ConfigError

START_QUIET_S = 2.0
MIN_DURATION_S = 10.0
KILL_WINDOW_S = 60.0
MAX_KILLS_PER_WINDOW = 3
"""Of one role, or of frontends and planners. A supervisor that sees one child crash five times within a minute rightly
gives up."""


class FaultKind(enum.StrEnum):
    """What happens to the cluster or to its clients."""

    KILL = "kill"
    """SIGKILL of a worker."""
    KILL_RANK = "kill_rank"
    """SIGKILL of one rank process of a worker with several; the worker must end by itself."""
    TERMINATE = "terminate"
    """SIGTERM of a worker, after a replacement was started by hand."""
    DRAIN = "drain"
    """``kvrelay drain`` of a worker, after a replacement was started by hand."""
    REVOKE = "revoke"
    """A worker's lease is revoked, after a replacement was started by hand."""
    FREEZE = "freeze"
    """SIGSTOP of a worker for longer than its lease, then SIGCONT."""
    SWITCH_ROLE = "switch_role"
    """A worker changes its role, and later changes back."""
    WIDEN = "widen"
    """A worker takes the other half of the work, too, and later gives it up."""
    KILL_FRONTEND = "kill_frontend"
    """SIGKILL of a frontend, which its supervisor starts again; its clients send their requests again."""
    KILL_NATS = "kill_nats"
    """SIGKILL of the NATS server, which its supervisor starts again."""
    FREEZE_NATS = "freeze_nats"
    """SIGSTOP of the NATS server for a lease and a half, then SIGCONT."""
    DISCONNECT = "disconnect"
    """Clients that leave in the middle of their streams."""
    CANCEL = "cancel"
    """Clients that leave before their first token."""
    BURST = "burst"
    """More requests at once than the frontend admits."""
    KILL_BROKER = "kill_broker"
    """SIGKILL of the process that owns the host's KV memory; a worker starts another."""
    KILL_PLANNER = "kill_planner"
    """SIGKILL of the planner, which its supervisor starts again."""


ROLES = ("prefill", "decode")
AGAINST_WORKERS = (
    FaultKind.KILL,
    FaultKind.KILL_RANK,
    FaultKind.TERMINATE,
    FaultKind.DRAIN,
    FaultKind.REVOKE,
    FaultKind.FREEZE,
    FaultKind.SWITCH_ROLE,
    FaultKind.WIDEN,
)
"""These strike one role; the others have none."""
CRASHES = (FaultKind.KILL, FaultKind.KILL_RANK, FaultKind.KILL_FRONTEND, FaultKind.KILL_PLANNER)
"""Kills that a supervisor counts as crashes."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. ``at_s`` counts from the start of the load; ``choice`` in [0, 1) picks among the possible victims, and
    ``severity`` in [0, 1) scales faults that have a degree."""

    at_s: float
    kind: FaultKind
    role: str = ""
    choice: float = 0.0
    severity: float = 0.0

    @property
    def name(self) -> str:
        """Kind and role, as reports group them."""
        return f"{self.kind} {self.role}".strip()


def make_plan(
    duration_s: float,
    seed: int,
    *,
    interval_s: float = 3.0,
    quiet_end_s: float = 8.0,
    with_ranks: bool = False,
    with_broker: bool = False,
    with_planner: bool = False,
) -> tuple[Fault, ...]:
    """Faults about every ``interval_s``, the first after two seconds, none in the last ``quiet_end_s``. With
    ``with_ranks`` (workers of several ranks) ranks are killed too, ``with_broker`` (KV tiers) the broker,
    ``with_planner`` (one that acts) the planner.

    Raises ConfigError if that leaves no time for the first one.
    """
    end_s = duration_s - quiet_end_s
    if duration_s < MIN_DURATION_S or end_s < START_QUIET_S:
        least = max(MIN_DURATION_S, quiet_end_s + START_QUIET_S)
        raise ConfigError(f"duration must be at least {least:g} s, got {duration_s:g}", param="duration")
    rng = random.Random(seed)
    possible = {
        FaultKind.KILL_RANK: with_ranks,
        FaultKind.KILL_BROKER: with_broker,
        FaultKind.KILL_PLANNER: with_planner,
    }
    absent = {kind for kind, is_possible in possible.items() if not is_possible}
    faults: list[Fault] = []
    pending: list[tuple[FaultKind, str]] = []
    at_s = START_QUIET_S
    while at_s <= end_s:
        pending = pending or _round(rng, absent)
        number = next((i for i, (kind, role) in enumerate(pending) if _is_allowed(faults, kind, role, at_s)), None)
        if number is None:
            pending = []
        else:
            kind, role = pending.pop(number)
            faults.append(Fault(round(at_s, 3), kind, role, rng.random(), rng.random()))
        at_s += interval_s * rng.uniform(0.5, 1.5)
    return tuple(faults)


def _round(rng: random.Random, absent: set[FaultKind]) -> list[tuple[FaultKind, str]]:
    kinds = [kind for kind in FaultKind if kind not in absent]
    entries = [(kind, role) for kind in kinds for role in (ROLES if kind in AGAINST_WORKERS else ("",))]
    rng.shuffle(entries)
    return entries


def _is_allowed(faults: list[Fault], kind: FaultKind, role: str, at_s: float) -> bool:
    """Whether one more fault of this kind stays within the limit on kills."""
    if kind not in CRASHES:
        return True
    recent = [f for f in faults if f.kind in CRASHES and f.role == role and at_s - f.at_s < KILL_WINDOW_S]
    return len(recent) < MAX_KILLS_PER_WINDOW
