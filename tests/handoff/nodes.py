"""The parts of a world: what is explored, a worker of each side, its lease; how they are copied and compared."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import dataclass, field, fields
from itertools import islice
from operator import attrgetter
from typing import Any, TypeVar

from tests.handoff.keys import Frame, call_key, decode_ledger_key, prefill_ledger_key, side_key

from kvrelay.core.handoff import HandoffId, HandoffOrder, KvDirection
from kvrelay.core.latest import Latest
from kvrelay.handoff.decode import DecodeHandoff
from kvrelay.handoff.decode_ledger import DecodeLedger
from kvrelay.handoff.decode_state import DecodeRules
from kvrelay.handoff.leases import PeerLeases
from kvrelay.handoff.prefill import PrefillHandoff
from kvrelay.handoff.prefill_ledger import PrefillLedger
from kvrelay.handoff.prefill_state import PrefillRules

TTL = 2
Move = tuple[Any, ...]
T = TypeVar("T")
H = TypeVar("H", DecodeHandoff, PrefillHandoff)
PROMPT = frozenset({"deliver", "complete", "work", "turn", "arrive", "tick", "pull"})
"""Moves that take no time, unless the fault "late" lets it pass. Everything else takes as long as it likes."""
PROMPT_TOKEN = 7
"""The first token of every answer."""
D = -1
"""The decode worker's place; prefill workers are 0, 1, ..."""


class Violation(AssertionError):
    """Something happened that may never happen."""


@dataclass(frozen=True)
class Scenario:
    """What is explored. ``faults``: the kinds that may occur; ``max_faults``: how many of them in one run."""

    num_prefill: int = 2
    num_requests: int = 1
    num_hit_blocks: int = 0
    num_chunks: int = 1
    """Of one block each."""
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    is_paired: bool = False
    """Prefill-first as workers do it: the first prefill worker is the only claimant, the request waits for blocks
    before its hand-off opens, and P does not know D's hits before the grant."""
    recalls: bool = False
    """Paired: the claimant has a unit of time to begin."""
    is_prefix: bool = False
    """P reads a prefix of D's cache: no request waits at D."""
    direction: KvDirection = KvDirection.PUSH
    with_blocks: bool = True
    by_engine: bool = False
    """Pull: the engines move the KV themselves, so there are no blocks."""
    keeps: bool = False
    """Pull: P's engine moves what is computed out of its pool."""
    checksums: bool = False
    incompatible: bool = False
    can_replace_blocks: bool = True
    faults: frozenset[str] = frozenset()
    max_faults: int = 1
    max_computing: int = 1
    """Hand-offs that a prefill worker has at once."""
    lags: bool = False
    """What is asked of an engine, or needs a connection, takes time even if no answer is waited for."""
    with_grammar: bool = False
    """P compiles something before it begins."""
    slow: bool = False
    """Timeouts far apart, so that only faults run into them."""
    progress: bool = False
    """P tells that it computes, and D takes back what a silent claimant has."""
    knows_decode: bool = True
    """Whether discovery has ever listed the decode worker for the prefill workers."""
    copies: bool = False
    """As transport shm does it: a prefill worker's own process copies, checks the fence before it begins, and may be
    stopped in the middle."""
    has_bar: bool = True
    """With ``copies``: D counts the end of a lease only once its holder is not in the middle of a copy."""
    transport_fence: bool = True
    transport_order: bool = True

    @property
    def num_known_hits(self) -> int:
        """Hit blocks that P knows of when it begins."""
        return 0 if self.is_paired else self.num_hit_blocks

    def decode_rules(self) -> DecodeRules:
        return DecodeRules(
            block_size=1,
            kv_compatibility="same",
            remote_prefill_timeout_s=6 if self.slow else 2,
            grant_timeout_s=6 if self.slow else 4 if self.progress else 2,
            silence_timeout_s=2 if self.progress else 6,
            max_attempts=2,
            early_claim_timeout_s=3 if self.slow else 1,
            abandon_repeat_s=1,
            prefix_timeout_s=2,
            held_s=1,
            avoid_s=2,
            overtaken_s=1,
            can_replace_blocks=self.can_replace_blocks,
            checksums=self.checksums,
        )

    def prefill_rules(self, number: int) -> PrefillRules:
        return PrefillRules(
            worker_id=name(number),
            block_size=1,
            kv_compatibility="other" if self.incompatible else "same",
            claim_timeout_s=3 if self.slow else 1,
            paired_claim_timeout_s=3 if self.slow else 1,
            ready_repeat_s=1,
            progress_s=1 if self.progress else math.inf,
            release_repeat_s=1,
            max_release_repeat_s=1,
            gone_for_s=TTL + 1,
            can_keep=self.keeps,
            keep_after_s=0,
            checksums=self.checksums,
        )


@dataclass
class Lease:
    """A worker's lease, as the server has it and as its holder's own clock bounds it."""

    alive_until: float | None = None
    """None: refreshed all the time."""
    has_ended: bool = False
    is_lost: bool = False
    """The holder knows."""
    term: int = 1

    def may_touch(self, now: int) -> bool:
        return self.alive_until is None or now < self.alive_until

    def key(self, now: int) -> tuple[Any, ...]:
        return (None if self.alive_until is None else max(self.alive_until - now, 0), self.has_ended, self.is_lost)


@dataclass
class Node:
    """What both sides have."""

    lease: Lease = field(default_factory=Lease)
    is_stopped: bool = False
    is_dead: bool = False
    is_open: bool = True
    """Its role has the door of this side: a prefill worker pulls, the decode worker takes requests."""
    watch: tuple[tuple[int, str], ...] = ()
    """What happened to other workers' leases and is not known here yet, in order."""
    ops: tuple[Any, ...] = ()
    """Transfers that were submitted and have not landed."""
    ended_ops: tuple[Any, ...] = ()
    """Landed or failed; the owner does not know yet."""
    failed_groups: frozenset[str] = frozenset()
    """Of transfers: one that comes later fails, too (``transfer/queues.py``)."""
    inbox: tuple[Any, ...] = ()
    """Asked of the engine, and not taken in."""
    todo: tuple[Any, ...] = ()
    """Asked of the checksum thread and of the event loop."""
    side: Any = None
    plane: Any = None
    num_in_memory: int = 0
    """Of how many grants the transfer thread knows."""
    is_full: bool = False
    """For the length of one move: the engine has no room for what it is asked for."""
    is_copying: bool = False
    """The oldest transfer is being copied by this process."""
    cached: tuple[Frame, int] | None = None

    def key_id(self, frame: Frame, ids: dict[Any, int]) -> int:
        """The number of ``key`` in ``ids``. Computed once for each copy: nodes are shared between worlds until they are
        touched."""
        if self.cached is None or self.cached[0] != frame:
            self.cached = (frame, ids.setdefault(self.key(frame), len(ids)))
        return self.cached[1]

    @property
    def ledger(self) -> Any:
        return self.side.ledger

    def key(self, frame: Frame) -> tuple[Any, ...]:
        watch = tuple((who, what if isinstance(what, str) else frame.term(name(who), what)) for who, what in self.watch)
        lease = self.lease.key(frame.now)
        state = (self.is_stopped, self.is_dead, self.is_copying, self.is_open)
        todo = tuple([(kind, call_key(call, frame), blocks) for kind, call, blocks in self.todo])
        return (
            lease,
            state,
            watch,
            self.ops,
            self.ended_ops,
            self.failed_groups,
            self.inbox,
            todo,
            side_key(self.side),
        )


@dataclass
class DecodeNode(Node):
    status: dict[HandoffId, str] = field(default_factory=dict)
    """By hand-off: new, expected, waiting, running, local, aborted, refused."""
    blocks: dict[HandoffId, tuple[int, ...]] = field(default_factory=dict)
    """The request's own references."""
    loans: dict[tuple[HandoffId, int], tuple[int, ...]] = field(default_factory=dict)
    writer: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """Who may write a block: hand-off, generation, loan."""
    opened: frozenset[tuple[str, int]] = frozenset()
    """Loans that a grant has been opened for."""
    content: dict[int, Any] = field(default_factory=dict)
    has_evicted: bool = False
    """The prefix is not in its cache any more."""
    barred: frozenset[int] = frozenset()
    """Prefill workers that may begin no copy."""

    def clone(self) -> DecodeNode:
        other = copied(self)
        other.cached = None
        other.lease = copied(self.lease)
        other.side = clone_side(self.side, clone_decode_ledger(self.ledger))
        other.status, other.blocks, other.loans = dict(self.status), dict(self.blocks), dict(self.loans)
        other.writer, other.content = dict(self.writer), dict(self.content)
        return other

    def fresh(self, count: int) -> tuple[int, ...]:
        """The lowest free blocks: what was freed is reused at once."""
        used = {block for blocks in (*self.blocks.values(), *self.loans.values()) for block in blocks}
        found = tuple(islice((block for block in itertools.count() if block not in used), count))
        for block in found:
            self.content.pop(block, None)
        return found

    def key(self, frame: Frame) -> tuple[Any, ...]:
        ledger = decode_ledger_key(self.ledger, frame)
        loans, writer = tuple(sorted(self.loans.items())), tuple(sorted(self.writer.items()))
        held = (Node.key(self, frame), ledger, loans, writer, self.opened, self.barred, self.has_evicted)
        if not self.ledger.handoffs and not {"new", "expected", "waiting"} & set(self.status.values()):
            return held  # nothing is left that reads or takes blocks
        return (
            *held,
            tuple(self.status.items()),
            tuple(sorted(self.content.items())),
            tuple(sorted(self.blocks.items())),
        )


@dataclass
class PrefillNode(Node):
    engine: dict[HandoffId, tuple[str, ...]] = field(default_factory=dict)
    """What is left to compute, by hand-off."""
    held: frozenset[HandoffId] = frozenset()
    """Hand-offs whose blocks are in use."""
    kept: frozenset[HandoffId] = frozenset()
    """Those whose KV is not in the pool any more, but in as many other blocks."""
    conn: int = 0
    """0: none."""
    num_conns: int = 0
    is_astray: bool = False
    """The next claim finds no way to the decode worker, unless there is a connection."""

    def clone(self) -> PrefillNode:
        other = copied(self)
        other.cached = None
        other.lease = copied(self.lease)
        other.side = clone_side(self.side, clone_prefill_ledger(self.ledger))
        for handoff_id, job in self.side.jobs.items():
            other.side.jobs[handoff_id] = copy.copy(job)
        other.engine = dict(self.engine)
        return other

    def key(self, frame: Frame) -> tuple[Any, ...]:
        engine = tuple(sorted(self.engine.items()))
        conn = frame.conn(self.conn)
        return (
            Node.key(self, frame),
            prefill_ledger_key(self.ledger, frame),
            engine,
            self.held,
            self.kept,
            conn,
            self.is_astray,
        )


def name(number: int) -> str:
    return "d" if number == D else f"p{number}"


def number_of(worker_id: str) -> int:
    return D if worker_id == "d" else int(worker_id[1:])


_VALUES = {kind: attrgetter(*(f.name for f in fields(kind))) for kind in (DecodeHandoff, PrefillHandoff)}


# -- copies and keys --------------------------------------------------------------------------------------------------


def copied(original: T) -> T:
    """A shallow copy: ``copy.copy``, several times as fast."""
    other = object.__new__(type(original))
    other.__dict__.update(original.__dict__)
    return other


def clone_handoff(handoff: H) -> H:
    """The machines' fields hold immutable values."""
    kind = type(handoff)
    return kind(*_VALUES[kind](handoff))


def clone_side(side: Any, ledger: Any) -> Any:
    """With what it keeps beside its ledger."""
    other = copied(side)
    kept = other.__dict__
    for attribute, value in side.__dict__.items():
        if type(value) is dict:
            kept[attribute] = value.copy()
        elif type(value) is Latest:
            kept[attribute] = value.__copy__()
    other.ledger = ledger
    return other


def clone_leases(leases: PeerLeases) -> PeerLeases:
    other = copied(leases)
    other.live, other.fences_s = leases.live.copy(), leases.fences_s.copy()
    other.ends = leases.ends.__copy__()
    return other


def clone_decode_ledger(ledger: DecodeLedger) -> DecodeLedger:
    other = clone_ledger(ledger)
    other.connections = dict(ledger.connections)
    other.early = dict(ledger.early)
    other.expected = dict(ledger.expected)
    other.declined = ledger.declined.__copy__()
    other.conduct = copied(ledger.conduct)
    other.conduct.failures = ledger.conduct.failures.__copy__()
    other.conduct.until_s = ledger.conduct.until_s.__copy__()
    return other


def clone_prefill_ledger(ledger: PrefillLedger) -> PrefillLedger:
    other = clone_ledger(ledger)
    other.seen = ledger.seen.__copy__()
    return other


def clone_ledger(ledger: Any) -> Any:
    """Counters are shared: they decide nothing."""
    other = copied(ledger)
    other.handoffs = {key: clone_handoff(handoff) for key, handoff in ledger.handoffs.items()}
    other.leases = clone_leases(ledger.leases)
    return other
