"""What the parts of a worker share: its settings, its engine, the planes, and its place in the cluster."""

from __future__ import annotations

import msgspec

from kvrelay.config import WorkerConfig
from kvrelay.control.base import ControlPlane
from kvrelay.core.handoff import KvDirection
from kvrelay.engine.contract import EngineHost
from kvrelay.rpc.base import RpcServer
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.checksums import BlockChecksums
from kvrelay.worker.cluster.membership import Membership
from kvrelay.worker.cluster.memory import PeerMemory
from kvrelay.worker.decode.refusals import Refusals
from kvrelay.worker.identity import WorkerIdentity
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.prefill.connections import DecodePeers


class Surroundings(msgspec.Struct, frozen=True):
    """No part owns any of it; the worker starts and closes them."""

    settings: WorkerConfig
    identity: WorkerIdentity
    engine: EngineHost
    control: ControlPlane
    server: RpcServer
    membership: Membership
    transfer: TransferThread
    checksums: BlockChecksums
    peers: DecodePeers
    memory: PeerMemory
    refusals: Refusals
    marks: WorkerMarks

    @property
    def worker_id(self) -> str:
        return self.identity.worker_id

    @property
    def kv_compatibility(self) -> str:
        """The digest that two workers must share to exchange KV."""
        return self.membership.kv_compatibility

    @property
    def term(self) -> int:
        """This worker's, now."""
        return self.membership.term

    @property
    def direction(self) -> KvDirection:
        """Who moves the KV of the hand-offs that this worker opens."""
        is_pull = self.engine.facts.moves_kv or self.settings.transfer.is_pull
        return KvDirection.PULL if is_pull else KvDirection.PUSH
