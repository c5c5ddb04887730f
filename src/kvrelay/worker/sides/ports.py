"""What the two sides of a worker ask of their surroundings, and how they are called back.

    news ──> a method of a side ──> its ledger ──> ``carry_out`` ──> a port ──> ... ──> a method of the side

Three planes have these ports: a worker's event loop, threads and sockets (``turns.py``, ``prefill/links.py``,
``cluster/memory.py``), the simulator's heap and clock, and the tests' explorer. A *call* is given to a port as a bound
method of the side, or as a ``partial`` of one with frozen values. The plane runs it once, later, with the answer behind
them: never within the call that gave it, whose lock is still held. So a plane can keep calls, compare them, and run
them on a copy of the side, as the explorer does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import msgspec

from kvrelay.core.layout import BlockRun
from kvrelay.core.window import MemoryWindow, RemoteKey
from kvrelay.engine.contract import Engine
from kvrelay.errors import KvrelayError
from kvrelay.handoff.messages import HandoffReleased, HandoffReport
from kvrelay.rpc.wire import Message
from kvrelay.transfer.values import Pieces, TransferOp


class Turns(Protocol):
    """One event of a side at a time, from whatever thread; its clock; its event loop."""

    @property
    def lock(self) -> AbstractContextManager[object]:
        """Held while an event is handled and its actions are passed on."""

    def now(self) -> float:
        """Monotonic seconds."""

    def plan_tick(self, due_s: Callable[[], float | None]) -> None:
        """After each event, under the lock: from ``due_s()`` on a Tick is due; None: not before another event."""

    def on_loop(self, function: Callable[..., object], *arguments: object) -> None:
        """Run it on the event loop: at once if this is its thread."""

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Run it on the event loop, never within this call."""


class EnginePort(Protocol):
    """The engine's inbox."""

    def post(self, callback: Callable[[Engine], None]) -> None:
        """Run it between two steps, in order."""


class TransferPort(Protocol):
    """``TransferThread``."""

    def open_window(self, window: MemoryWindow) -> None: ...

    def close_window(self, handoff: str, loan: int) -> None: ...

    def submit(
        self,
        op: TransferOp,
        worker_id: str,
        pieces: Pieces,
        notify: bytes | None = None,
        *,
        on_done: Callable[[str | None], None],
        group: str | None = None,
        timeout_s: float | None = None,
        key: RemoteKey | None = None,
    ) -> None: ...


class ChecksumPort(Protocol):
    """``BlockChecksums``."""

    def compute(self, block_ids: Sequence[int], on_done: Callable[[tuple[int, ...] | None], None]) -> None: ...

    def verify(
        self,
        block_ids: Sequence[int],
        sent: Sequence[int] | None,
        on_done: Callable[[str | None], None],
        num_units: int | None = None,
    ) -> None: ...


class MemoryPort(Protocol):
    """``PeerMemory``."""

    def reach(self, worker_id: str, then: Callable[[KvrelayError | None], None]) -> None:
        """Connect to the peer's memory if need be, then ``then(None)`` or ``then(error)``, later. On the event loop."""

    def pieces(self, op: TransferOp, worker_id: str, here: BlockRun, there: BlockRun, block_size: int) -> Pieces | None:
        """None: they do not fit the peer's memory, or that is gone."""


class SidePorts(msgspec.Struct):
    """Those that both sides have."""

    turns: Turns
    engine: EnginePort
    transfer: TransferPort
    checksums: ChecksumPort
    memory: MemoryPort


class ConnectionPort(Protocol):
    """``RpcServer``: connections that prefill workers have made."""

    def send(self, peer: Any, message: Message, /) -> bool:
        """Whether the connection stands. Raises PayloadTooLargeError."""


class DecodeWorkerPort(Protocol):
    """``DecodeLinks``: connections to decode workers, made at first use. On the event loop."""

    def remember(self, worker_id: str, address: str) -> None:
        """Where a queue entry says that it listens."""

    def reach(self, worker_id: str, then: Callable[[Link | None, KvrelayError | None], None]) -> None:
        """Connect to the worker and its memory if need be, then ``then(link, None)``, perhaps at once, or
        ``then(None, error)``, later."""

    def tell(self, worker_id: str, message: HandoffReport) -> None:
        """Connect if need be, and send; nothing if that fails, or while the hand-off's last message still waits."""

    def release(self, worker_id: str, message: HandoffReleased, heard: Callable[[], None]) -> None:
        """The same; ``heard()`` if the worker has acknowledged it."""


class Link(Protocol):
    """A connection to a decode worker."""

    def send(self, message: Message) -> None:
        """Raises KvrelayError; the message may have arrived all the same."""
