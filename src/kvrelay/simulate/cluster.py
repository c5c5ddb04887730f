"""What is simulated: how many workers of which role, their settings, and what happens to them at which time."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence

import msgspec

from kvrelay.config import DisaggConfig, EngineConfig, RouterConfig, TiersConfig, TransferConfig, WorkerRole
from kvrelay.core.handoff import OrderPolicy
from kvrelay.errors import ConfigError
from kvrelay.planner import WorkerView

MAX_WORKERS = 10_000
ROLE_PREFIX = {"p": WorkerRole.PREFILL, "d": WorkerRole.DECODE, "b": WorkerRole.BOTH}


class Change(enum.StrEnum):
    """What can happen to a worker."""

    START = "start"
    """A new worker is launched in ``role``; it takes requests after ``Costs.start_s``."""
    KILL = "kill"
    """Its process dies; its peers learn of that by silence."""
    DRAIN = "drain"
    """It finishes its work and leaves."""
    ROLE = "role"
    """It continues in ``role``. Widened to ``both`` it serves on; narrowed from ``both`` it finishes the other half's
    work first; else it finishes all its work first."""


class ClusterEvent(msgspec.Struct, frozen=True):
    """A change at a virtual time. ``worker_id``: of KILL, DRAIN and ROLE; the first workers are p0, p1, ..., d0, ...
    and b0, ...; started ones count on."""

    time_s: float
    change: Change
    worker_id: str = ""
    role: WorkerRole | None = None

    def check(self) -> None:
        """Raise ConfigError if a worker is to start or to change, and nobody says to which role."""
        if self.change in (Change.START, Change.ROLE) and self.role is None:
            raise ConfigError(f"event at {self.time_s:g} s: {self.change} needs a role", param="event")


_EVENT = re.compile(r"(\d+(?:\.\d+)?)s:(?:(kill|drain):(\w+)|(role):(\w+):(\w+)|(start):(\w+))")


def parse_event(text: str) -> ClusterEvent:
    """``30s:kill:d1``, ``30s:drain:p0``, ``30s:role:d1:prefill`` or ``30s:start:decode``. Raises ConfigError."""
    match = _EVENT.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"event {text!r} is none of 30s:kill:d1, 30s:drain:p0, 30s:role:d1:prefill, 30s:start:decode", param="event"
        )
    time_s, ending, ended, _, moved, new_role, start, start_role = match.groups()
    if ending:
        return ClusterEvent(float(time_s), Change(ending), ended)
    try:
        role = WorkerRole(new_role or start_role)
    except ValueError as exc:
        raise ConfigError(f"event {text!r}: the role must be prefill, decode or both", param="event") from exc
    return ClusterEvent(float(time_s), Change.START if start else Change.ROLE, moved or "", role)


class ClusterSpec(msgspec.Struct, frozen=True):
    """``prefill``, ``decode`` and ``both`` count the first workers by role. ``frontends`` share the frontend's work
    evenly. ``vocab_size`` and ``max_model_len`` are the model's. ``kv_buffer_size``: bytes of each worker's holding
    area. ``tiers``: of each host, which has ``workers_per_host`` of the workers in the order of their start."""

    prefill: int = 0
    decode: int = 0
    both: int = 0
    frontends: int = 1
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    disagg: DisaggConfig = msgspec.field(default_factory=DisaggConfig)
    router: RouterConfig = msgspec.field(default_factory=RouterConfig)
    order: OrderPolicy = OrderPolicy.AUTO
    events: tuple[ClusterEvent, ...] = ()
    lease_ttl_s: float = 10.0
    migration_limit: int = 3
    vocab_size: int = 32000
    max_model_len: int = 32768
    kv_buffer_size: int = TransferConfig().kv_buffer_size
    tiers: TiersConfig = msgspec.field(default_factory=TiersConfig)
    workers_per_host: int = 8

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode + self.both

    def __str__(self) -> str:
        parts = ((self.prefill, "P"), (self.decode, "D"), (self.both, "B"))
        return "".join(f"{count}{name}" for count, name in parts if count)

    def check(self) -> None:
        """Raise ConfigError if no worker takes requests at the start, or a count is negative."""
        if min(self.prefill, self.decode, self.both, self.frontends - 1) < 0:
            raise ConfigError("counts of workers cannot be negative, and one frontend is needed", param="prefill")
        if self.decode + self.both < 1:
            raise ConfigError("no worker takes requests; give --decode or --both at least 1", param="decode")
        if self.num_workers > MAX_WORKERS:
            raise ConfigError(f"{self.num_workers:,} workers are too many; at most {MAX_WORKERS:,}", param="prefill")
        if self.tiers.is_on and not self.engine.enable_prefix_caching:
            raise ConfigError("KV tiers keep prefixes; leave out --no-enable-prefix-caching", param="host_kv_cache")
        started = [event.role for event in self.events if event.change is Change.START]
        for event in self.events:
            role, number = ROLE_PREFIX.get(event.worker_id[:1]), event.worker_id[1:]
            event.check()
            if event.change is Change.START:
                continue
            if role is None or not number.isdecimal() or int(number) >= self._num_first(role) + started.count(role):
                raise ConfigError(
                    f"event at {event.time_s:g} s: no worker is called {event.worker_id!r}; the first ones are p0, d0 "
                    "and b0, as far as the counts go",
                    param="event",
                )

    def _num_first(self, role: WorkerRole) -> int:
        return {WorkerRole.PREFILL: self.prefill, WorkerRole.DECODE: self.decode, WorkerRole.BOTH: self.both}[role]


Controller = Callable[[float, Sequence[WorkerView]], Sequence[ClusterEvent]]
"""``controller(now_s, view) -> actions``, called at intervals. An action happens at its ``time_s``, or now if that
has passed."""
