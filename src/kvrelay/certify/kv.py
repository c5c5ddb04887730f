"""The rows about KV itself, between two ends: is it the same there, also under reuse and cancellation, and how fast.

The giver is connected to the taker, as a prefill worker to a decode worker. Before each trial both pools are *at rest*:
every block holds a pattern of its own, so that a byte in the wrong block shows, wherever it is.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvrelay.certify.counters import Evidence, Octets, Way
from kvrelay.certify.ends import Arrived, Await, Blocks, Cancel, Check, End, Fill, HandOver, RawCopy, Told
from kvrelay.certify.findings import Facts, Group, Row, Series, Verdict
from kvrelay.certify.pattern import Damage, Known
from kvrelay.errors import TransferError
from kvrelay.transfer.values import TransferOp

AWAIT_S = 60.0
GIVER_AT_REST, TAKER_AT_REST = 4001, 4002
MAX_HANDOFF = 4000
"""Generations from 1 to here are those of hand-offs, in turn."""
WINDOW = 4
"""Hand-offs in flight at once."""
MAX_RESIDENTS = 8
MAX_UNITS = 5
"""Blocks of a hand-off, of the larger block size."""
CANCEL_SHARE = 0.15
MIN_OF_LINK = 0.6
MIN_OF_COPY = 0.2
"""A path that is slower than this share of the link's own limit, or of the memory's own copy, is not the path that one
wants. A copy by another process runs at half of a plain one and more; TCP within a host at a tenth."""

NUM_CARRIED = 3
NUM_TORN, NUM_LOOKS, LOOK_PAUSE_S = 4, 3, 0.01
"""Transfers in flight when a connection is torn down, and looks at what lands later."""

Progress = Callable[[float], None]
"""Gets the share that is done."""


def _quiet(share: float) -> None:
    """No one watches."""


class Pair:
    """Two ends, and the hand-offs between them. A *unit* is the fewest tokens that are whole blocks of both."""

    def __init__(self, giver: End, taker: End) -> None:
        self.giver, self.taker = self.ends = giver, taker
        unit = math.lcm(giver.layout.block_size, taker.layout.block_size)
        self.per_unit = [unit // end.layout.block_size for end in self.ends]
        """Blocks of each end."""
        self.most = min(end.num_blocks // per for end, per in zip(self.ends, self.per_unit))
        """Units that fit into both pools."""
        self._num_handoffs = 0

    def next(self) -> tuple[int, int]:
        """The number of another hand-off, and its generation."""
        self._num_handoffs += 1
        return self._num_handoffs, (self._num_handoffs - 1) % MAX_HANDOFF + 1

    def blocks(self, num_units: int, first: int = 0) -> tuple[Blocks, Blocks]:
        """The first ``num_units`` units of each pool, or those from ``first`` on."""
        own, theirs = (Blocks(tuple(range(first * per, (first + num_units) * per))) for per in self.per_unit)
        return own, theirs

    def lay_to_rest(self) -> Damage | None:
        """Both pools; what is wrong."""
        return lay_to_rest(self.giver, GIVER_AT_REST) or lay_to_rest(self.taker, TAKER_AT_REST)

    def move(self, own: Blocks, theirs: Blocks) -> Told:
        """A hand-off from its begin to its notification."""
        number, _ = self.next()
        self.giver.tell(HandOver(number, TransferOp.WRITE, own, theirs))
        told = self.giver.tell(Await(number, AWAIT_S))
        arrived = told if told.error is not None else self.taker.tell(Arrived(number, AWAIT_S))
        return told if arrived.error is None else arrived


# -- Right: block by block --------------------------------------------------------------------------------------------


def prove_blocks(giver: End, taker: End, cell: str, seed: int = 0, progress: Progress = _quiet) -> Row:
    """Writes to the taker and reads from it, of adjacent and scattered blocks, each compared word by word; no other
    block may change."""
    began_s, pair = time.monotonic(), Pair(giver, taker)
    trials = list(_trials(pair, seed))
    problem, num_bytes = None, 0
    for at, (op, name, own, theirs) in enumerate(trials):
        problem = _try_blocks(pair, op, own, theirs)
        num_bytes += len(own.ids) * giver.layout.block_bytes
        progress((at + 1) / len(trials))
        if problem is not None:
            problem = f"{op.value} of {name}: {problem}"
            break
    reason = problem or f"{len(trials)} of {len(trials)} trials arrived word for word, and nothing else changed"
    layouts = (f"tp {of.tp_size} pp {of.pp_size}, blocks of {of.block_size}" for of in (giver.layout, taker.layout))
    evidence: Facts = {"trials": len(trials), "bytes compared": num_bytes, "layout": " to ".join(layouts)}
    return _row("KV, block by block", cell, problem, reason, evidence, began_s)


def _trials(pair: Pair, seed: int) -> Iterator[tuple[TransferOp, str, Blocks, Blocks]]:
    """(op of the giver, name, the giver's blocks, the taker's). Both sides have whole blocks of the same tokens."""
    draw, most = random.Random(seed), pair.most // 2
    for op in (TransferOp.WRITE, TransferOp.READ):
        for name, num_units, is_scattered, first in (
            ("adjacent blocks", most, False, 0),
            ("scattered blocks", most, True, 0),
            ("one block", 1, False, 0),
            ("the middle of a prompt, scattered", max(1, most // 2), True, 3),
        ):
            sides = []
            for end, count in zip(pair.ends, pair.per_unit):
                num = num_units * count
                start = draw.randrange(end.num_blocks - num + 1)
                chosen = draw.sample(range(end.num_blocks), num) if is_scattered else range(start, start + num)
                sides.append(Blocks(tuple(chosen), first * count))
            yield op, name, sides[0], sides[1]


def _try_blocks(pair: Pair, op: TransferOp, own: Blocks, theirs: Blocks) -> str | Damage | None:
    """One trial; what is wrong."""
    if (damage := pair.lay_to_rest()) is not None:
        return f"a pattern that a device has just written reads back otherwise: {damage}"
    giver, taker = pair.ends
    number, generation = pair.next()
    is_write = op is TransferOp.WRITE
    source, target = ((giver, own), (taker, theirs)) if is_write else ((taker, theirs), (giver, own))
    source[0].tell(Fill(source[1], generation))
    if not is_write:
        # The owner has computed it long ago: a read is of a cached prefix.
        source[0].tell(Check(source[1], generation))
    error = giver.tell(HandOver(number, op, own, theirs, is_notified=is_write)).error
    error = error or giver.tell(Await(number, AWAIT_S)).error
    if error is None and is_write:
        error = taker.tell(Arrived(number, AWAIT_S)).error
    if error is not None:
        return error
    rests = (GIVER_AT_REST, TAKER_AT_REST) if is_write else (TAKER_AT_REST, GIVER_AT_REST)
    damage = target[0].tell(Check(target[1], generation, Known(*rests))).damage
    if damage is not None:
        return damage
    others = tuple(sorted(set(range(target[0].num_blocks)) - set(target[1].ids)))
    spilled = target[0].tell(Check(Blocks(others, is_at_rest=True), rests[1])).damage
    return None if spilled is None else f"bytes outside of the blocks that were handed over: {spilled}"


def lay_to_rest(end: End, generation: int) -> Damage | None:
    """Every block gets the pattern of its own number."""
    blocks = Blocks(tuple(range(end.num_blocks)), is_at_rest=True)
    end.tell(Fill(blocks, generation))
    return end.tell(Check(blocks, generation)).damage


# -- Right: reuse -----------------------------------------------------------------------------------------------------


class _Flight(msgspec.Struct, frozen=True):
    """``is_cancelled``: only its first half was begun, and its blocks are the taker's again when that has ended."""

    number: int
    generation: int
    own: Blocks
    theirs: Blocks
    is_cancelled: bool


class _Reuse:
    """Many hand-offs over few blocks. A block is used again as soon as its hand-off has ended; what it then holds must
    stay until it is used again."""

    def __init__(self, pair: Pair, seed: int) -> None:
        self._pair = pair
        self._draw = random.Random(seed)
        self._free = [list(range(end.num_blocks)) for end in pair.ends]
        self._flights: deque[_Flight] = deque()
        self._residents: deque[tuple[Blocks, int]] = deque()
        self.num_done = self.num_cancelled = self.num_checks = 0

    def run(self, num_handoffs: int, progress: Progress) -> str | Damage | None:
        """What is wrong; None: nothing."""
        problem: str | Damage | None = self._pair.lay_to_rest()
        for at in range(num_handoffs):
            problem = problem or self._make_room() or self._begin()
            if problem is not None:
                return problem
            if at % 16 == 0:
                progress(at / num_handoffs)
        while problem is None and (self._flights or self._residents):
            problem = self._finish() if self._flights else self._evict()
        return problem

    def _make_room(self) -> str | Damage | None:
        while True:
            lacks = any(len(free) < MAX_UNITS * per for free, per in zip(self._free, self._pair.per_unit))
            if len(self._flights) >= WINDOW or (lacks and self._flights):
                problem = self._finish()
            elif len(self._residents) >= MAX_RESIDENTS or (lacks and self._residents):
                problem = self._evict()
            else:
                return None
            if problem is not None:
                return problem

    def _begin(self) -> str | None:
        num_units, first = self._draw.randint(2, MAX_UNITS), self._draw.randrange(8)
        own, theirs = (self._take(side, num_units, first) for side in (0, 1))
        number, generation = self._pair.next()
        self._pair.giver.tell(Fill(own, generation))
        is_cancelled = self._draw.random() < CANCEL_SHARE
        self._flights.append(_Flight(number, generation, own, theirs, is_cancelled))
        kept = num_units // 2 if is_cancelled else num_units
        own, theirs = (
            Blocks(each.ids[: kept * per], each.first_block) for each, per in zip((own, theirs), self._pair.per_unit)
        )
        return self._pair.giver.tell(HandOver(number, TransferOp.WRITE, own, theirs, not is_cancelled)).error

    def _take(self, side: int, num_units: int, first_unit: int) -> Blocks:
        free, per = self._free[side], self._pair.per_unit[side]
        self._draw.shuffle(free)
        taken, free[:] = tuple(free[: num_units * per]), free[num_units * per :]
        return Blocks(taken, first_unit * per)

    def _finish(self) -> str | Damage | None:
        """The oldest in flight. The taker computes at once in the blocks of a cancelled one."""
        flight = self._flights.popleft()
        error = self._pair.giver.tell(Await(flight.number, AWAIT_S)).error
        if error is None and not flight.is_cancelled:
            error = self._pair.taker.tell(Arrived(flight.number, AWAIT_S)).error
        if error is not None:
            return error
        self._free[0] += flight.own.ids
        generation = flight.generation
        if flight.is_cancelled:
            self.num_cancelled += 1
            _, generation = self._pair.next()
            self._pair.taker.tell(Fill(flight.theirs, generation))
        else:
            self.num_done += 1
        self._residents.append((flight.theirs, generation))
        return None if flight.is_cancelled else self._look(flight.theirs, generation)

    def _evict(self) -> str | Damage | None:
        blocks, generation = self._residents.popleft()
        self._free[1] += blocks.ids
        return self._look(blocks, generation)

    def _look(self, blocks: Blocks, generation: int) -> Damage | None:
        self.num_checks += 1
        return self._pair.taker.tell(Check(blocks, generation, Known(GIVER_AT_REST, TAKER_AT_REST))).damage


def prove_reuse(
    giver: End, taker: End, cell: str, num_handoffs: int, seed: int = 0, progress: Progress = _quiet
) -> Row:
    """Many hand-offs, some given up half-way, whose blocks are used again at once: a late write shows."""
    began_s = time.monotonic()
    reuse = _Reuse(Pair(giver, taker), seed)
    problem = reuse.run(num_handoffs, progress)
    reason = f"{reuse.num_done:,} hand-offs whole, {reuse.num_cancelled:,} cancelled, no block damaged"
    evidence: Facts = {
        "hand-offs": num_handoffs,
        "cancelled": reuse.num_cancelled,
        "comparisons": reuse.num_checks,
        "blocks": taker.num_blocks,
    }
    return _row("KV under reuse and cancellation", cell, problem, problem or reason, evidence, began_s)


def prove_torn(giver: End, taker: End, cell: str, num_times: int = 20, progress: Progress = _quiet) -> Row:
    """Connections torn down in mid-transfer, as after a missed deadline: do bytes that were under way land later?

    What an RDMA device or a socket holds already, no sender can take back. So late bytes are a warning: they say for
    how long blocks must rest after such an end.
    """
    began_s, pair = time.monotonic(), Pair(giver, taker)
    num_torn = num_late = 0
    for at in range(num_times):
        # Large ones and small ones: what is under way depends on it.
        num_units = max(1, pair.most // (NUM_TORN * (1, 4, 16, 64)[at % 4]))
        numbers = []
        for part in range(NUM_TORN):
            own, theirs = pair.blocks(num_units, part * num_units)
            number, generation = pair.next()
            numbers.append(number)
            giver.tell(Fill(own, generation))
            giver.tell(HandOver(number, TransferOp.WRITE, own, theirs, is_notified=False))
        giver.tell(Cancel())
        is_torn = any([giver.tell(Await(number, AWAIT_S)).error is not None for number in numbers])
        _, reused = pair.next()
        _, theirs = pair.blocks(NUM_TORN * num_units)
        taker.tell(Fill(theirs, reused))
        looks = []
        for _ in range(NUM_LOOKS):
            time.sleep(LOOK_PAUSE_S)
            looks.append(taker.tell(Check(theirs, reused)).damage)
        num_torn += is_torn
        num_late += is_torn and any(looks)
        progress((at + 1) / num_times)
    evidence: Facts = {"torn in mid-transfer": num_torn, "with late bytes": num_late}
    reason = f"{num_torn} of {num_times} were torn in mid-transfer, and none of their bytes came later"
    if num_late:
        reason = (
            f"after {num_late} of {num_torn} torn connections bytes landed that were under way: blocks that are reused "
            "at once after a transfer that missed its deadline may be damaged"
        )
    verdict = Verdict.WARN if num_late else Verdict.PASS
    if not num_torn:
        verdict, reason = Verdict.SKIP, "every transfer had ended before its connection could be torn down"
    row = _row("a connection torn down in mid-transfer", cell, None, reason, evidence, began_s, Group.HOLDS)
    return msgspec.structs.replace(row, verdict=verdict)


# -- Fast -------------------------------------------------------------------------------------------------------------


def measure_path(
    giver: End,
    taker: End,
    cell: str,
    *,
    link_bytes_per_s: float | None = None,
    num_rounds: int = 5,
    progress: Progress = _quiet,
) -> Row:
    """Bandwidth over size of the path that hand-offs take, in turns with the device's own copy. ``link_bytes_per_s``:
    what the link can do; None: the ends share a host, and the copy is the yardstick."""
    began_s, pair = time.monotonic(), Pair(giver, taker)
    counts = sorted({min(pair.most, 2**power) for power in range(0, pair.most.bit_length() + 1)})
    path, copies, latency_s = [], [], 0.0
    for at, count in enumerate(counts):
        own, theirs = pair.blocks(count)
        num_bytes = len(theirs.ids) * taker.layout.block_bytes
        moved, copied = [], []
        for number in range(num_rounds + 1):
            told = pair.move(own, theirs)
            if told.error is not None:
                return _row("bandwidth", cell, told.error, told.error, {}, began_s, Group.FAST)
            if number:  # the first one warms up
                moved.append(told.seconds)
                copied.append(giver.tell(RawCopy(num_bytes)).seconds)
        path.append((float(num_bytes), num_bytes / statistics.median(moved)))
        copies.append((float(num_bytes), num_bytes / statistics.median(copied)))
        latency_s = latency_s or statistics.median(moved)
        progress((at + 1) / len(counts))
    return _bandwidth_row(cell, path, copies, latency_s, link_bytes_per_s, began_s)


def _bandwidth_row(
    cell: str,
    path: Sequence[tuple[float, float]],
    copies: Sequence[tuple[float, float]],
    latency_s: float,
    link_bytes_per_s: float | None,
    began_s: float,
) -> Row:
    # The largest size: smaller ones fit into a processor's caches, which flatters a copy more than a transfer.
    best, copy = max(speed for _, speed in path), copies[-1][1]
    speed, limit, least, name = (
        (path[-1][1], copy, MIN_OF_COPY, "the memory's own copy")
        if link_bytes_per_s is None
        else (best, link_bytes_per_s, MIN_OF_LINK, "the link")
    )
    share = speed / limit
    reason = f"{speed / 1e9:.2f} GB/s, {share:.0%} of {name} ({limit / 1e9:.2f} GB/s); one block takes "
    reason += f"{latency_s * 1e6:.0f} us"
    problem = None if share >= least else f"{reason}; below {least:.0%} the path is not what the hardware offers"
    evidence: Facts = {"best GB/s": round(best / 1e9, 3), "raw copy GB/s": round(copy / 1e9, 3)}
    evidence["one block, us"] = round(latency_s * 1e6, 1)
    series = (Series("bandwidth", cell, tuple(path)), Series("bandwidth", f"raw copy ({cell})", tuple(copies)))
    row = _row("bandwidth", cell, problem, problem or reason, evidence, began_s, Group.FAST)
    return msgspec.structs.replace(row, series=series)


def carry(giver: End, taker: End, num_bytes: int, read: Callable[[], Octets]) -> Evidence:
    """Hand-offs of at least ``num_bytes``, between two looks at the counters. If these say TCP it is tried again, a few
    times: other traffic passes, TCP stays. Raises TransferError."""
    pair, found = Pair(giver, taker), list[Evidence]()
    own, theirs = pair.blocks(pair.most)
    while not found or (found[-1].way is Way.TCP and len(found) < NUM_CARRIED):
        before, moved = read(), 0
        while moved < num_bytes:
            told = pair.move(own, theirs)
            if told.error is not None:
                raise TransferError(told.error)
            moved += len(theirs.ids) * taker.layout.block_bytes
        found.append(Evidence(moved, read().since(before)))
    return min(found, key=lambda evidence: evidence.factor)


# -- rows -------------------------------------------------------------------------------------------------------------


def _row(
    title: str,
    cell: str,
    problem: str | Damage | None,
    reason: str | Damage,
    evidence: Facts,
    began_s: float,
    group: Group = Group.RIGHT,
) -> Row:
    verdict = Verdict.PASS if problem is None else Verdict.FAIL
    return Row(group, title, cell, verdict, str(reason), evidence, seconds=time.monotonic() - began_s)
