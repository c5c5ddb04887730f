"""Communicators of this worker, one per pair of workers and initiator, and the threads that move data over them.

    control thread ── send, receive: tasks in order ──> lane thread: make the group, send or receive
                  <── done(pair, error) ─────────────────────────────

The first task that moves data makes the group, which blocks until the peer's first one does so too. Each direction has
its own thread, begun at its first task: a send waits for the peer's receive, so one thread for both could wait in a
circle. The first failure ends a pair: its tasks fail, its threads end, its descriptors are given back.

``Communicators`` bounds their number. What is idle gives way to what is new, the longest idle first.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec

from kvrelay.errors import TransferError
from kvrelay.transfer.p2p.process_group import PairGroup, PairStore
from kvrelay.transfer.values import worker_of

DEPTH = 2
"""Sends or receives that a lane has begun: the next one moves while the last one is copied into its blocks."""


class Task(msgspec.Struct, eq=False):
    """One send or receive, with what belongs to it."""

    begin: Callable[[Callable[[], PairGroup], int], Any]
    """Gets a function that makes the group if need be, and a slot from 0 to DEPTH - 1 that no other task of the lane
    has which has begun. On a lane's thread: the work that was begun, None if there is nothing to wait for. Raises
    TransferError, which ends the pair."""
    ended: Callable[[str | None], object]
    """Exactly once, whether it ran or not, with the error: nothing of it touches memory any more. On any thread."""
    finish: Callable[[], object] = lambda: None
    """On the same thread as ``begin``, when the work has been done."""


class _Lane:
    """A thread that runs tasks in order, DEPTH of them overlapping. Once the pair has ended, tasks fail unbegun."""

    def __init__(self, name: str, pair: Communicator) -> None:
        self._pair = pair
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._begun: deque[tuple[Task, Any]] = deque()
        self._num_begun = 0
        self._is_closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, task: Task | None) -> None:
        self._tasks.put(task)

    def _run(self) -> None:
        while self._begun or not self._is_closed:
            self._begin_some()
            if self._begun:
                task, work = self._begun.popleft()
                error = None if work is None else self._attempt(partial(self._wait, work))
                del work
                if error is None:
                    # What follows moves while this one is copied.
                    self._begin_some(may_block=False)
                    error = self._attempt(task.finish)
                task.ended(error)
                del task
        self._pair.lane_ended()

    def _wait(self, work: Any) -> None:
        self._pair.group().wait(work)

    def _begin_some(self, *, may_block: bool = True) -> None:
        """Begin tasks up to DEPTH; wait for one only if none is under way."""
        while not self._is_closed and len(self._begun) < DEPTH:
            try:
                task = self._tasks.get(block=may_block and not self._begun)
            except queue.Empty:
                return
            if task is None:
                self._is_closed = True
                return
            self._begin(task)

    def _begin(self, task: Task) -> None:
        works: list[Any] = []
        slot = self._num_begun % (DEPTH + 1)
        error = "the communicator is closed" if self._pair.is_closed else None
        error = error or self._attempt(lambda: works.append(task.begin(self._pair.group, slot)))
        if error is None:
            self._num_begun += 1
            self._begun.append((task, works.pop()))
        else:
            task.ended(error)

    def _attempt(self, call: Callable[[], object]) -> str | None:
        """The error, after which the pair is closed. The exception dies here, and with it its hold on buffers."""
        try:
            call()
        except Exception as exc:  # noqa: BLE001 - a device may be out of memory: every task ends, whatever happens
            error = exc.message if isinstance(exc, TransferError) else f"the communicator failed: {exc!r}"
        else:
            return None
        self._pair.fail(error)
        return error


class Communicator:
    """``rank`` 0 is the initiator. ``on_failed`` runs on a lane thread, once.

    ``num_open`` counts the messages that need the pair; one with none is idle since ``used_s``.
    """

    def __init__(
        self,
        name: str,
        peer_id: str,
        rank: int,
        *,
        device: str,
        timeout_s: float,
        send_key: Callable[[str, bytes], None],
        on_failed: Callable[[Communicator, str], None],
    ) -> None:
        self.name = name
        self.peer_id = peer_id
        self.rank = rank
        self.num_open = 0
        self.used_s = 0.0
        self.store = PairStore(send_key, timeout_s)
        self._device = device
        self.timeout_s = timeout_s
        self._on_failed = on_failed
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._group: PairGroup | None = None
        self.is_closed = False
        self._lanes: dict[str, _Lane] = {}
        self._num_ended = 0
        self.staging: dict[tuple[str, int], Any] = {}
        """Memory to gather into, by lane and slot: made by its tasks, and only theirs."""

    def __repr__(self) -> str:
        return f"Communicator({self.name} with {self.peer_id}, rank {self.rank}, {self.num_open} open)"

    def run(self, direction: str, task: Task) -> None:
        """Run it on the thread that sends, or the one that receives ("send", "receive"), after those before it."""
        with self._lock:
            if not self.is_closed:
                lane = self._lanes.get(direction)
                if lane is None:
                    lane = self._lanes[direction] = _Lane(f"p2p-{direction}", self)
                lane.put(task)
                return
        task.ended("the communicator is closed")

    def group(self) -> PairGroup:
        """For tasks. Raises TransferError."""
        with self._making:
            if self._group is None:
                if self.is_closed:
                    raise TransferError("the communicator is closed", peer=self.peer_id)
                self._group = PairGroup(self.store, self.rank, self._device, self.timeout_s)
                self._hang_up_if_closed()
            return self._group

    def fail(self, error: str) -> None:
        """A task has failed."""
        with self._lock:
            was_closed, self.is_closed = self.is_closed, True
        self._end()
        if not was_closed:
            self._on_failed(self, error)

    def close(self) -> None:
        """End it, from the control thread: tasks that wait for the peer fail at once where that is possible."""
        with self._lock:
            self.is_closed = True
        self._end()

    def join(self, timeout_s: float) -> bool:
        """After ``close``: whether its threads have ended, and with them its descriptors."""
        for lane in self._lanes.values():
            lane.thread.join(timeout_s)
        return not any(lane.thread.is_alive() for lane in self._lanes.values())

    def lane_ended(self) -> None:
        """The last of the lanes gives back the group's threads and descriptors, and the staging memory."""
        with self._lock:
            self._num_ended += 1
            if self._num_ended == len(self._lanes):
                self._group = None
                self.staging.clear()

    def _hang_up_if_closed(self) -> None:
        """Called after the group was made and after the pair was closed, so one of the two sees both."""
        group = self._group
        if self.is_closed and group is not None:
            with contextlib.suppress(OSError):
                group.hang_up()

    def _end(self) -> None:
        self.store.close()
        self._hang_up_if_closed()
        for lane in self._lanes.values():
            lane.put(None)


class Communicators:
    """All pairs, by name. Only the control thread uses it."""

    def __init__(self, max_pairs: int) -> None:
        self._max_pairs = max_pairs
        self.pairs: dict[str, Communicator] = {}
        self.ending: list[Communicator] = []
        """Closed, and their threads may not have ended yet."""
        self.num_made = 0
        self.num_evicted = 0

    def __repr__(self) -> str:
        return f"Communicators({len(self.pairs)} of {self._max_pairs}, {self.num_evicted} evicted)"

    def make_room(self, reserved: int = 0) -> list[Communicator] | None:
        """What to close so that one more fits beside ``reserved`` others that are being made; None: all are in use."""
        excess = len(self.pairs) + reserved + 1 - self._max_pairs
        if excess <= 0:
            return []
        idle = sorted((pair for pair in self.pairs.values() if pair.num_open == 0), key=lambda pair: pair.used_s)
        return idle[:excess] if len(idle) >= excess else None

    def add(self, pair: Communicator) -> None:
        self.pairs[pair.name] = pair
        self.num_made += 1

    def find(self, name: str, peer_id: str) -> Communicator | None:
        """A pair is known to its two workers only."""
        pair = self.pairs.get(name)
        return pair if pair is not None and pair.peer_id == peer_id else None

    def of_peer(self, peer_id: str) -> list[Communicator]:
        return [pair for pair in self.pairs.values() if peer_id in (pair.peer_id, worker_of(pair.peer_id))]

    def idle_since(self, before_s: float) -> list[Communicator]:
        """Pairs that nothing has used since."""
        return [pair for pair in self.pairs.values() if pair.num_open == 0 and pair.used_s <= before_s]

    @property
    def num_alive(self) -> int:
        """Pairs that have threads, or may get some."""
        return len(self.pairs) + len(self.ending)

    def remove(self, pair: Communicator) -> None:
        """It is being closed."""
        if self.pairs.pop(pair.name, None) is not None:
            self.ending.append(pair)

    def forget_ended(self) -> None:
        """Closed pairs whose threads have ended."""
        self.ending = [pair for pair in self.ending if not pair.join(0)]
