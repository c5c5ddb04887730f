"""The one thread that calls a worker's Transport.

It owns the order of posts, deadlines, polling and counting. It does not know requests, and of hand-offs only how many
are open; it runs callbacks.

    any thread ── submit ──> inbox ──> one FIFO per peer ──> posts of at most MAX_POST_BYTES ──> poll ──> on_done(error)

Promises:
  - ``on_done`` runs exactly once per submitted transfer, never within ``submit``, and must not block.
  - To one peer, transfers are posted in the order of submission, and one with ``notify`` only when all before it have
    ended. So a notification arrives after the bytes of every earlier write.
  - Once a transfer of a ``group`` has failed, every later one of that group fails too, unposted: a notification "done"
    never overtakes the failure of a write that belongs to it.
  - A transfer that fails at the peer, or misses its deadline, tears the connection down. All other unfinished transfers
    with that peer then fail as well, and none of their bytes move any more. The next submission reconnects.
  - Nothing is posted past its deadline, nor past the ``fence``, even by a process that was stopped in between. When the
    fence passes, the connections with posted transfers are torn down. The fence is the time until which no peer counts
    this worker as dead: after it, peers reuse the blocks that we were allowed to write.
  - After ``fail_all`` returns, no earlier submission is posted any more.
  - The thread sleeps unless a transfer is unfinished. While a hand-off is open it polls, or sleeps until the transport
    wakes it up (``Transport.wake_fds``).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TypeVar

from kvrelay.config import TransferConfig
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.histogram import Histogram
from kvrelay.core.layout import MemoryRegion
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.core.workers import KvMetadata
from kvrelay.errors import TransferError
from kvrelay.transfer.base import Transport
from kvrelay.transfer.inbox import Inbox
from kvrelay.transfer.pieces import split_pieces
from kvrelay.transfer.queues import OnDone, Transfer, TransferQueues
from kvrelay.transfer.stats import StatsCounter, TransferStats
from kvrelay.transfer.values import Pieces, TransferOp

MAX_POST_BYTES = 32 * 1024 * 1024
"""On one host a post blocks for the whole copy; this bounds how long notifications and deadlines wait for it."""
_EAGER_POLLS_PER_INTERVAL = 8
_EAGER_POLLS = 64

T = TypeVar("T")

_log = logging.getLogger(__name__)


class TransferThread:
    """Runs a Transport. All public methods may be called from any thread.

    ``fence()``: the time on ``clock`` until which posts are allowed; called on the transfer thread. ``on_failed`` runs
    on the transfer thread if it ends by a failure, after all unfinished transfers have failed: no KV can move any more.
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
        transport.fence = fence or transport.fence
        self._queues = TransferQueues(transport, self._clock, transport.fence, self._finish)
        self._on_failed = on_failed
        self._inbox = Inbox()
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._lock = threading.Lock()
        self._closed = False
        self._num_handoffs = 0
        self._num_unfinished = 0
        self._counter = StatsCounter()
        self._leaving: set[str] = set()
        self._on_notification: Callable[[bytes], None] | None = None
        self._polls_since_progress = 0

    # -- from any thread -------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def register(self, region: MemoryRegion, *, kv_compatibility: str = "") -> Future[bytes]:
        """Register the KV pool, once; returns ``KvMetadata.agent``. The future raises FatalError.

        ``kv_compatibility``, if given, must be the same at every peer.
        """
        return self._post_call(lambda: self._register(region, kv_compatibility))

    def on_notification(self, handler: Callable[[bytes], None]) -> None:
        """``handler`` runs on the transfer thread, must not block, and must not trust the payload."""
        self._on_notification = handler

    def add_peer(self, metadata: KvMetadata) -> Future[None]:
        """Connect to a peer. The future raises IncompatiblePeerError, or TransferError if the peer is unreachable."""
        return self._post_call(lambda: self._queues.connect(metadata))

    def has_peer(self, worker_id: str) -> bool:
        """Whether the peer was added and not removed. If its connection is down, the next transfer reconnects."""
        return self._queues.knows(worker_id) and worker_id not in self._leaving

    def remove_peer(self, worker_id: str) -> Future[None]:
        """Tear the connection down, fail its unfinished transfers, forget the peer."""
        self._leaving.add(worker_id)
        return self._post_teardown(lambda: self._forget(worker_id))

    def bar(self, worker_id: str) -> Future[bool]:
        """``Transport.bar``. Raises TransferError when the thread is closed."""
        return self._post_call(lambda: self._transport.bar(worker_id))

    def learn(self, worker_id: str, public_key: str) -> None:
        """``Transport.learn``."""
        self._transport.learn(worker_id, public_key)

    @property
    def late_s(self) -> float:
        """``Transport.late_s``."""
        return self._transport.late_s

    def open_window(self, window: MemoryWindow) -> None:
        """``Transport.open_window``."""
        self._transport.open_window(window)

    def close_window(self, handoff: str, loan: int) -> None:
        """``Transport.close_window``."""
        self._transport.close_window(handoff, loan)

    def admit(self, worker_id: str) -> Future[None]:
        """``Transport.admit``. Nothing when the thread is closed."""
        return self._post_teardown(lambda: self._transport.admit(worker_id))

    def submit(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: Pieces,
        notify: bytes | None = None,
        *,
        on_done: OnDone,
        group: str | None = None,
        timeout_s: float | None = None,
        key: RemoteKey | None = None,
    ) -> None:
        """Move ``pieces``, then deliver ``notify`` to the peer; calls ``on_done(None)`` or ``on_done(reason)``.

        ``timeout_s``, if given, shortens the configured ``transfer_timeout_s``, e.g. to the rest of a lease. ``key``:
        of the peer's window.
        """
        now = self._clock.now()
        limit = self._config.transfer_timeout_s
        deadline_s = now + (limit if timeout_s is None else min(limit, timeout_s))
        parts = deque(split_pieces(pieces, MAX_POST_BYTES))
        with self._lock:
            term = self._queues.term
            transfer = Transfer(op, worker_id, pieces, notify, on_done, group, term, now, deadline_s, parts, 0, key)
            accepted = not self._closed
            if accepted:
                self._num_unfinished += 1
                self._inbox.put(lambda: self._accept(transfer))
        if not accepted:
            # The caller may hold a lock that on_done takes.
            threading.Thread(target=on_done, args=("the transfer thread is closed",), daemon=True).start()

    def fail_all(self, reason: str) -> Future[None]:
        """Tear every connection down and fail all unfinished transfers. None of them is posted from now on; the posted
        ones have stopped when the future is done. Peers stay known: later submissions reconnect."""
        with self._lock:
            self._queues.withdraw()
        return self._post_teardown(lambda: self._queues.disconnect_all(reason))

    def open_handoff(self) -> None:
        """From now on peers may need this side to poll. Pairs with ``close_handoff``."""
        with self._lock:
            self._num_handoffs += 1
            first = self._num_handoffs == 1
        if first:
            self._inbox.put(_wake)

    def close_handoff(self) -> None:
        with self._lock:
            assert self._num_handoffs > 0, "close_handoff without open_handoff"
            self._num_handoffs -= 1

    def check_integrity(self) -> None:
        """``Transport.check_integrity``."""
        self._transport.check_integrity()

    @property
    def durations(self) -> Mapping[TransferOp, Histogram]:
        """Of ended transfers, from submission to end. Not copied: they go on."""
        return self._counter.durations

    def count_read(self, worker_id: str, num_bytes: int, seconds: float) -> None:
        """The engine has read KV of a peer by itself: it counts like a read of this thread."""
        with self._lock:
            self._counter.add(worker_id, TransferOp.READ, num_bytes, 0, seconds, None)

    def stats(self) -> TransferStats:
        p2p = self._transport.p2p_counters()
        with self._lock:
            return self._counter.snapshot(self._num_unfinished, self._num_handoffs, p2p)

    def close(self) -> None:
        """Fail all unfinished transfers, close the transport, end the thread. Idempotent."""
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
            f"<TransferThread {self._queues!r}, {self._num_unfinished} unfinished, {self._num_handoffs} hand-offs open>"
        )

    def _post_call(self, function: Callable[[], T]) -> Future[T]:
        """Run ``function`` on the transfer thread."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller no longer waits
            try:
                future.set_result(function())
            except Exception as exc:  # noqa: BLE001 - any exception goes to the caller
                future.set_exception(exc)

        with self._lock:
            if self._closed:
                raise TransferError("the transfer thread is closed")
            self._inbox.put(run)
        return future

    def _post_teardown(self, function: Callable[[], None]) -> Future[None]:
        """As above, for commands that need no work once the thread is closed: its connections are torn down then."""
        try:
            return self._post_call(function)
        except TransferError:
            done: Future[None] = Future()
            done.set_result(None)
            return done

    # -- on the transfer thread, or on the only one of a simulation that has not called ``start`` ------------------

    @property
    def has_turn(self) -> bool:
        """Whether the next turn (``take_commands``, ``step``) does not wait for a command."""
        return not (self._queues.is_idle and self._inbox.empty())

    def _run(self) -> None:
        failure: Exception | None = None
        try:
            while self.take_commands():
                self.step()
        except Exception as exc:  # noqa: BLE001 - the outermost loop of this thread
            _log.exception("the transfer thread failed")
            failure = exc
        try:
            self._shut_down()
        finally:
            if failure is not None and self._on_failed is not None:
                self._on_failed(failure)

    def step(self) -> None:
        """Post what is due, and handle what has ended and arrived."""
        self._queues.post_due()
        completions, notifications = self._transport.poll()
        # Notifications first: a request waits for "prefill done".
        for notification in notifications:
            self._notify(notification)
        for completion in completions:
            self._queues.complete(completion)
        self._polls_since_progress = 0 if completions or notifications else self._polls_since_progress + 1

    def take_commands(self) -> bool:
        """Run the commands in the inbox, after a pause that depends on the open work. False: closed."""
        wait_s = self._wait_s()
        try:
            command = self._inbox.get_nowait() if wait_s == 0 else self._inbox.get(wait_s)
            while command is not None:
                command()
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _wait_s(self) -> float | None:
        """Seconds to wait for a command before the next poll; None: until one comes."""
        if not self._queues.is_idle:
            if self._polls_since_progress == 0:
                return 0
            eager = self._polls_since_progress < _EAGER_POLLS
            return self._config.poll_interval_s / (_EAGER_POLLS_PER_INTERVAL if eager else 1)
        return self._config.poll_interval_s if self._num_handoffs and not self._transport.wake_fds else None

    def _register(self, region: MemoryRegion, kv_compatibility: str) -> bytes:
        agent = self._queues.register(region, kv_compatibility)
        if self._transport.wake_fds:
            self._inbox.watch(*self._transport.wake_fds)
        return agent

    def _accept(self, transfer: Transfer) -> None:
        self._queues.accept(transfer)
        self._polls_since_progress = 0

    def _forget(self, worker_id: str) -> None:
        self._queues.forget(worker_id)
        self._leaving.discard(worker_id)
        with self._lock:
            self._counter.forget(worker_id)

    def _finish(self, transfer: Transfer, error: str | None) -> None:
        seconds = self._clock.now() - transfer.submitted_s
        with self._lock:
            self._num_unfinished -= 1
            pieces = transfer.pieces
            self._counter.add(transfer.worker_id, transfer.op, pieces.num_bytes, pieces.num_pieces, seconds, error)
        try:
            transfer.on_done(error)
        except Exception:  # noqa: BLE001 - a callback's defect must not stop other transfers
            _log.exception("on_done of a transfer with worker %s failed", transfer.worker_id)

    def _notify(self, notification: bytes) -> None:
        with self._lock:
            self._counter.num_notifications += 1
        if self._on_notification is None:
            _log.warning("dropped a notification of %d bytes: no handler is set", len(notification))
            return
        try:
            self._on_notification(notification)
        except Exception:  # noqa: BLE001 - as for on_done
            _log.exception("the notification handler failed")

    def _shut_down(self) -> None:
        with self._lock:
            self._closed = True
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            if command is not None:
                command()
        self._inbox.close()
        self._queues.disconnect_all("the transfer thread is closed")
        self._transport.close()


def _wake() -> None:
    """A command that does nothing but end the wait."""
