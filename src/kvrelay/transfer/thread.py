"""The one thread that calls a worker's Transport.

What it owns: the order of posts, deadlines, when to poll, counting. What it does not know: requests and hand-offs
beyond "one is open"; it runs callbacks.

    any thread ── submit ──> inbox ──> one FIFO per peer ──> posts of at most MAX_POST_BYTES ──> poll ──> on_done(error)

Promises:
  - ``on_done`` runs exactly once per submitted transfer, never within ``submit``, and must not block.
  - To one peer, transfers are posted in the order of submission, and one with ``notify`` only when all before it have
    ended. So a notification arrives behind the bytes of every earlier write.
  - Once a transfer of a ``group`` has failed, every later one of that group fails too, unposted: a notification "done"
    never overtakes the failure of a write that belongs to it.
  - A transfer that fails at the peer, or is not done at its deadline, tears the connection down; everything else under
    way with that peer fails with it, and nothing of it moves any more. The next submission connects anew.
  - Nothing is posted past its deadline, nor past the ``fence``, even by a process that was stopped in between; when the
    fence passes, what was posted is torn down with its connection. The fence is the time until which nobody counts this
    worker as dead: behind it others reuse the blocks that we were allowed to write.
  - After ``fail_all`` returns nothing submitted before is posted any more.
  - The thread sleeps unless a transfer is unfinished or a hand-off is open.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

from kvrelay.config import TransferConfig
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import RecomputeError, TransferError
from kvrelay.transfer.base import Completion, Notification, TransferOp, TransferPlan, Transport
from kvrelay.transfer.compat import check_compatible
from kvrelay.transfer.plan import check_bounds, split_plan
from kvrelay.transfer.stats import StatsCounter, TransferStats

OnDone = Callable[[str | None], None]

MAX_POST_BYTES = 32 * 1024 * 1024
"""On one host a post blocks for the whole copy; this bounds how long notifications and deadlines wait for it."""
MAX_POSTS_PER_PEER = 8
MAX_FAILED_GROUPS = 4096
_EAGER_POLLS_PER_INTERVAL = 8
_EAGER_POLLS = 64

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Transfer:
    """A submitted transfer. ``parts`` are still to be posted; ``in_flight`` posts have not ended."""

    op: TransferOp
    worker_id: str
    plan: TransferPlan
    notify: bytes | None
    on_done: OnDone
    group: str | None
    term: int
    submitted_s: float
    deadline_s: float
    parts: deque[TransferPlan]
    in_flight: int = 0


class _Peer:
    """Queue and posts of one peer."""

    def __init__(self) -> None:
        self.waiting: deque[_Transfer] = deque()
        self.posts: dict[int, _Transfer] = {}

    @property
    def transfers(self) -> list[_Transfer]:
        """Everything unfinished, in order, each once."""
        return list(dict.fromkeys([*self.posts.values(), *self.waiting]))


class TransferThread:
    """Runs a Transport. All public methods may be called from any thread.

    ``fence()``: until when, on ``clock``, anything may be posted; asked from the transfer thread. ``on_failed`` runs on
    the transfer thread if it ends by a failure, after everything unfinished has failed: no KV can move any more.
    """

    def __init__(
        self,
        transport: Transport,
        config: TransferConfig,
        clock: Clock | None = None,
        *,
        fence: Callable[[], float] | None = None,
        on_failed: Callable[[Exception], None] | None = None,
    ) -> None:
        self._transport = transport
        self._config = config
        self._clock = clock or MonotonicClock()
        self._fence = fence or _never
        self._on_failed = on_failed
        self._term = 0
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._num_handoffs = 0
        self._num_unfinished = 0
        self._counter = StatsCounter()
        self._region: MemoryRegion | None = None
        self._required: tuple[int, str] = (0, "")
        self._known: dict[str, KvMetadata] = {}
        self._leaving: set[str] = set()
        self._on_notification: Callable[[Notification], None] | None = None
        self._peers: dict[str, _Peer] = {}
        self._owners: dict[int, _Transfer] = {}
        self._polls_since_progress = 0
        self._failed_groups: OrderedDict[str, str] = OrderedDict()

    # -- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def register(self, region: MemoryRegion, *, block_bytes: int = 0, kv_compatibility: str = "") -> Future[bytes]:
        """Register the KV pool, once; gives ``KvMetadata.agent``. The future raises FatalError.

        ``block_bytes`` and ``kv_compatibility``, where given, are what every peer has to have too.
        """

        def run() -> bytes:
            agent = self._transport.register(region)
            self._region = region
            self._required = (block_bytes, kv_compatibility)
            return agent

        return self._post_call(run)

    def on_notification(self, handler: Callable[[Notification], None]) -> None:
        """``handler`` runs on the transfer thread, must not block, and must not trust the payload."""
        self._on_notification = handler

    def add_peer(self, metadata: KvMetadata) -> Future[None]:
        """Connect to a peer. The future raises IncompatiblePeerError, or TransferError when it cannot be reached."""
        return self._post_call(lambda: self._connect(metadata))

    def has_peer(self, worker_id: str) -> bool:
        """Whether the peer was added and not removed. Its connection may be down; the next transfer makes it anew."""
        return worker_id in self._known and worker_id not in self._leaving

    def remove_peer(self, worker_id: str) -> Future[None]:
        """Tear the connection down, fail what is under way on it, forget the peer."""
        self._leaving.add(worker_id)
        try:
            return self._post_call(lambda: self._forget(worker_id))
        except TransferError:
            # Closed: every connection is torn down.
            done: Future[None] = Future()
            done.set_result(None)
            return done

    def submit(
        self,
        op: TransferOp,
        worker_id: str,
        plan: TransferPlan,
        notify: bytes | None = None,
        *,
        on_done: OnDone,
        group: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Move ``plan``'s bytes, then deliver ``notify`` to the peer; ``on_done(None)``, or why not.

        ``timeout_s``, if given, shortens the configured ``transfer_timeout_s``, e.g. to what is left of a lease.
        """
        now = self._clock.now()
        limit = self._config.transfer_timeout_s
        deadline_s = now + (limit if timeout_s is None else min(limit, timeout_s))
        parts = deque(split_plan(plan, MAX_POST_BYTES))
        with self._lock:
            transfer = _Transfer(op, worker_id, plan, notify, on_done, group, self._term, now, deadline_s, parts)
            accepted = not self._closed
            if accepted:
                self._num_unfinished += 1
                self._inbox.put(lambda: self._accept(transfer))
        if not accepted:
            # The caller may hold a lock that on_done takes.
            threading.Thread(target=on_done, args=("the transfer thread is closed",), daemon=True).start()

    def fail_all(self, reason: str) -> None:
        """Tear every connection down and fail what is unfinished. From now on nothing of it is posted; what was posted
        has stopped when the thread has come to it. Peers stay known: later submissions connect anew."""
        with self._lock:
            self._term += 1
            if not self._closed:
                self._inbox.put(lambda: self._disconnect_all(reason))

    def open_handoff(self) -> None:
        """From now on peers may need our polling. Pairs with ``close_handoff``."""
        with self._lock:
            self._num_handoffs += 1
            first = self._num_handoffs == 1
        if first:
            self._inbox.put(_wake)

    def close_handoff(self) -> None:
        with self._lock:
            assert self._num_handoffs > 0, "close_handoff without open_handoff"
            self._num_handoffs -= 1

    def stats(self) -> TransferStats:
        with self._lock:
            return self._counter.snapshot(self._num_unfinished, self._num_handoffs)

    def close(self) -> None:
        """Fail what is unfinished, close the transport, end the thread. Idempotent."""
        with self._lock:
            self._closed = True
        if self._thread.ident is None:
            self._shut_down()
            return
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def __repr__(self) -> str:
        return (
            f"<TransferThread {self._transport.name}: {len(self._known)} peers, {self._num_unfinished} unfinished, "
            f"{self._num_handoffs} hand-offs open>"
        )

    def _post_call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the transfer thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                future.set_result(function())
            except Exception as exc:  # noqa: BLE001 - handed to the caller, whatever it is
                future.set_exception(exc)

        with self._lock:
            if self._closed:
                raise TransferError("the transfer thread is closed")
            self._inbox.put(run)
        return future

    # -- on the transfer thread ------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while self._take_commands():
                self._step()
        except Exception as exc:  # noqa: BLE001 - the outermost loop of this thread
            _log.exception("the transfer thread failed")
            failure = exc
        try:
            self._shut_down()
        finally:
            if failure is not None and self._on_failed is not None:
                self._on_failed(failure)

    def _step(self) -> None:
        self._expire()
        for worker_id, peer in list(self._peers.items()):
            # Pumping one may disconnect another.
            if self._peers.get(worker_id) is peer:
                self._pump(worker_id, peer)
        completions, notifications = self._transport.poll()
        # Notifications first: "prefill done" is what somebody waits for.
        for notification in notifications:
            self._notify(notification)
        for completion in completions:
            self._complete(completion)
        self._polls_since_progress = 0 if completions or notifications else self._polls_since_progress + 1

    def _take_commands(self) -> bool:
        """Run what is in the inbox, after a pause that depends on what is going on. False: closed."""
        wait_s = self._wait_s()
        try:
            command = self._inbox.get_nowait() if wait_s == 0 else self._inbox.get(timeout=wait_s)
            while command is not None:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _wait_s(self) -> float | None:
        """How long to wait for a command before the next poll; None: until one comes."""
        if self._peers:
            if self._polls_since_progress == 0:
                return 0
            eager = self._polls_since_progress < _EAGER_POLLS
            return self._config.poll_interval_s / (_EAGER_POLLS_PER_INTERVAL if eager else 1)
        return self._config.poll_interval_s if self._num_handoffs else None

    def _connect(self, metadata: KvMetadata) -> None:
        if self._region is None:
            raise TransferError("the KV pool is not registered yet", peer=metadata.worker_id)
        block_bytes, kv_compatibility = self._required
        check_compatible(
            metadata, transport=self._transport.name, block_bytes=block_bytes, kv_compatibility=kv_compatibility
        )
        self._disconnect(metadata.worker_id, f"worker {metadata.worker_id} was added anew")
        self._transport.add_peer(metadata)
        self._known[metadata.worker_id] = metadata

    def _accept(self, transfer: _Transfer) -> None:
        if transfer.term != self._term:
            self._finish(transfer, "withdrawn before it was begun")
            return
        remote, region = self._known.get(transfer.worker_id), self._region
        if remote is None or region is None:
            self._finish(transfer, f"worker {transfer.worker_id} is not connected")
            return
        try:
            # The whole plan at once, before a first part of it moves.
            check_bounds(transfer.plan, region.num_bytes, remote.num_bytes, transfer.worker_id)
        except TransferError as exc:
            self._finish(transfer, exc.message)
            return
        self._peers.setdefault(transfer.worker_id, _Peer()).waiting.append(transfer)
        self._polls_since_progress = 0

    def _pump(self, worker_id: str, peer: _Peer) -> None:
        """Post what may be posted to one peer."""
        while peer.waiting and len(peer.posts) < MAX_POSTS_PER_PEER:
            transfer = peer.waiting[0]
            earlier_error = None if transfer.group is None else self._failed_groups.get(transfer.group)
            if earlier_error is not None:
                peer.waiting.popleft()
                self._finish(transfer, earlier_error)
                continue
            if transfer.term != self._term:
                self._disconnect_all("withdrawn")
                return
            if self._clock.now() >= min(transfer.deadline_s, self._fence()):
                self._expire()
                return
            notify = transfer.notify if len(transfer.parts) == 1 else None
            if (notify is not None and peer.posts) or not self._post(worker_id, peer, transfer, notify):
                return
            if not transfer.parts:
                peer.waiting.popleft()
        if not peer.waiting and not peer.posts:
            self._peers.pop(worker_id, None)

    def _post(self, worker_id: str, peer: _Peer, transfer: _Transfer, notify: bytes | None) -> bool:
        try:
            if not self._transport.has_peer(worker_id):
                self._transport.add_peer(self._known[worker_id])
            handle = self._transport.post(transfer.op, worker_id, transfer.parts[0], notify)
        except RecomputeError as exc:
            self._disconnect(worker_id, exc.message)
            return False
        transfer.parts.popleft()
        self._owners[handle] = peer.posts[handle] = transfer
        transfer.in_flight += 1
        return True

    def _complete(self, completion: Completion) -> None:
        transfer = self._owners.pop(completion.handle, None)
        if transfer is None:
            return  # failed already, with its connection
        peer = self._peers[transfer.worker_id]
        del peer.posts[completion.handle]
        transfer.in_flight -= 1
        if completion.error is not None:
            if not peer.waiting or peer.waiting[0] is not transfer:
                peer.waiting.appendleft(transfer)
            self._disconnect(transfer.worker_id, completion.error)
            return
        if transfer.in_flight == 0 and not transfer.parts:
            self._finish(transfer, None)
        if not peer.waiting and not peer.posts:
            self._peers.pop(transfer.worker_id, None)

    def _expire(self) -> None:
        """Fail what has passed its deadline, or everything behind the fence. What was posted takes its connection with
        it."""
        now = self._clock.now()
        if self._peers and now >= self._fence():
            self._disconnect_all("the lease has run out, so nothing may be written any more")
            return
        for worker_id, peer in list(self._peers.items()):
            late = [transfer for transfer in peer.transfers if now >= transfer.deadline_s]
            if any(transfer.in_flight for transfer in late):
                self._disconnect(worker_id, f"a transfer with worker {worker_id} ran past its deadline")
                continue
            for transfer in late:
                peer.waiting.remove(transfer)
                self._finish(transfer, f"a transfer with worker {worker_id} was not begun before its deadline")

    def _disconnect(self, worker_id: str, error: str) -> None:
        """Tear the connection down, then fail everything that was under way or queued on it."""
        if self._transport.has_peer(worker_id):
            self._transport.remove_peer(worker_id)
        peer = self._peers.pop(worker_id, None)
        if peer is None:
            return
        transfers = peer.transfers
        for handle in peer.posts:
            self._owners.pop(handle, None)
        # Whoever still holds this object must find nothing in it to post.
        peer.posts.clear()
        peer.waiting.clear()
        for transfer in transfers:
            self._finish(transfer, error)

    def _disconnect_all(self, error: str) -> None:
        for worker_id in list(self._peers):
            self._disconnect(worker_id, error)

    def _forget(self, worker_id: str) -> None:
        self._known.pop(worker_id, None)
        self._leaving.discard(worker_id)
        self._disconnect(worker_id, f"worker {worker_id} was removed")
        with self._lock:
            self._counter.forget(worker_id)

    def _finish(self, transfer: _Transfer, error: str | None) -> None:
        if error is not None and transfer.group is not None:
            self._failed_groups.setdefault(transfer.group, error)
            while len(self._failed_groups) > MAX_FAILED_GROUPS:
                self._failed_groups.popitem(last=False)
        seconds = self._clock.now() - transfer.submitted_s
        with self._lock:
            self._num_unfinished -= 1
            self._counter.add(transfer.worker_id, transfer.op, transfer.plan, seconds, error)
        try:
            transfer.on_done(error)
        except Exception:  # noqa: BLE001 - another room's fault must not stop the transfers of everybody else
            _log.exception("on_done of a transfer with worker %s failed", transfer.worker_id)

    def _notify(self, notification: Notification) -> None:
        with self._lock:
            self._counter.num_notifications += 1
        if self._on_notification is None:
            _log.warning("a notification of %d bytes arrived, and nobody listens", len(notification.payload))
            return
        try:
            self._on_notification(notification)
        except Exception:  # noqa: BLE001 - as for on_done
            _log.exception("the handler of notifications failed")

    def _shut_down(self) -> None:
        with self._lock:
            self._closed = True
        while True:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                break
            if command is not None:
                command()
        self._disconnect_all("the transfer thread is closed")
        self._transport.close()


def _never() -> float:
    return math.inf


def _wake() -> None:
    """A command that does nothing but end the wait."""
