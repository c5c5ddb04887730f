"""How a worker reacts to its peers and to its own lease: what discovery and connections report goes to each part that
holds something of the peer.

When this worker loses its lease, others may count it as gone, and reuse the blocks that it was allowed to write. So
its transfers stop first.
"""

from __future__ import annotations

import asyncio
import logging

from kvrelay.core.workers import KvMetadata
from kvrelay.engine.contract import EngineHost
from kvrelay.handoff import decode_events as de
from kvrelay.handoff import prefill_events as pe
from kvrelay.handoff.base import EndReason, LeaseEnded, LeaseLost, Registered
from kvrelay.rpc.wire import Message
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.cluster.callers import Caller, CallerKind, Callers
from kvrelay.worker.cluster.memory import PeerMemory
from kvrelay.worker.decode.serving import DecodeSide
from kvrelay.worker.prefill.connections import DecodePeer
from kvrelay.worker.prefill.pulling import PrefillSide

_log = logging.getLogger(__name__)


class PeerEvents:
    """On the event loop. Nothing arrives before ``attach``."""

    _transfer: TransferThread
    _memory: PeerMemory
    _decode: DecodeSide
    _prefill: PrefillSide

    def __init__(self, engine: EngineHost, callers: Callers) -> None:
        self._engine = engine
        self._callers = callers

    def attach(self, transfer: TransferThread, memory: PeerMemory, decode: DecodeSide, prefill: PrefillSide) -> None:
        """The parts that hold something of peers. They are built later, because they need what reports here."""
        self._transfer = transfer
        self._memory = memory
        self._decode = decode
        self._prefill = prefill

    # -- discovery ----------------------------------------------------------------------------------------------------

    def registered(self, metadata: KvMetadata) -> None:
        """A worker is listed, perhaps in another term than before."""
        worker_id, ttl_s, term = metadata.worker_id, metadata.lease_ttl_s, metadata.term
        self._callers.learn(Caller(CallerKind.WORKER, worker_id), metadata.public_key)
        self._transfer.learn(worker_id, metadata.public_key)
        self._tell_ledgers(Registered(worker_id, ttl_s, term))

    def lease_ended(self, worker_id: str) -> None:
        """A worker's lease has ended."""
        self._callers.forget(Caller(CallerKind.WORKER, worker_id))
        self._transfer.learn(worker_id, "")
        self._tell_ledgers(LeaseEnded(worker_id))
        self._forget_memory(worker_id)

    def no_prefill_worker(self) -> None:
        """The last prefill worker has gone."""
        self._engine.post(lambda core: core.keep_prefills_here())
        self._decode.handoffs.handle(de.NoPrefillWorker())

    # -- connections to decode workers --------------------------------------------------------------------------------

    def message(self, peer: DecodePeer, message: Message) -> None:
        """A decode worker's message about a hand-off."""
        self._prefill.handoffs.on_message(peer.worker_id, message)

    def connection_lost(self, worker_id: str) -> None:
        """The connection to a decode worker has ended."""
        self._prefill.handoffs.handle(pe.DecodeConnectionLost(worker_id))
        self._forget_memory(worker_id)

    def _tell_ledgers(self, event: Registered | LeaseEnded) -> None:
        """Each keeps the peers' leases itself: a lease and the hand-offs that depend on it change in one step, under
        the lock of their side."""
        self._decode.handoffs.handle(event)
        self._prefill.handoffs.handle(event)

    def _forget_memory(self, worker_id: str) -> None:
        self._memory.forget(worker_id)
        self._transfer.remove_peer(worker_id)

    # -- our own lease ------------------------------------------------------------------------------------------------

    def lease_lost(self) -> None:
        """Others may count this worker as dead: later writes could land in reused blocks.

        The fence already stops posts. This covers a lease that was ended before its time, and ensures that nothing
        continues under the next lease.
        """
        _log.warning("lease lost: abandoning hand-offs in progress")
        # The order matters: the first stops new submissions, the second withdraws submitted transfers.
        self._prefill.give_up_all(EndReason.LEASE_LOST)
        self._decode.handoffs.handle(LeaseLost())
        self._transfer.fail_all("lease lost")

    async def withdraw(self) -> None:
        """Return when no write of ours is in flight any more. The lease may stay alive."""
        self._prefill.give_up_all(EndReason.LEASE_LOST)
        await asyncio.wrap_future(self._transfer.fail_all("peers lost sight of this worker"))
