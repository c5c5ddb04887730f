"""This worker's place in discovery: its lease, where its KV memory lies, its entry in the list of workers.

    join()       the lease begins, kv_metadata/ID/0 appears    peers can reach our memory
    register()   workers/ID appears, or changes                frontends and peers send work
    unlist()     workers/ID disappears                         no new work; hand-offs go on
    leave()      the lease ends, everything goes               peers reuse the blocks that we were allowed to write

What somebody else changes or deletes of these entries while the lease lives is put back (``keep_entries``).

It does not know when these are due, nor what has to end when the lease is lost.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import socket
import time
from collections.abc import Awaitable, Callable

import msgspec

from kvrelay.control.base import Discovery, Keys, Lease, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.hashing import HASH_SEED
from kvrelay.core.layout import Compatibility
from kvrelay.core.messages import PROTOCOL_VERSION
from kvrelay.core.tasks import end_tasks
from kvrelay.core.workers import KvMetadata, WorkerInfo, WorkerRole
from kvrelay.engine.contract import EngineHost
from kvrelay.errors import ControlUnavailableError, LeaseLostError
from kvrelay.worker.settings import WorkerSettings

_log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
TERM_RETRY_INTERVAL_S = 0.05
RESTORE_DELAY_S = 1.0
FENCE_MARGIN_SHARE = 0.1
"""Of a lease's time to live: so much before its end the last byte is to be posted. Covers a post that blocks for its
copy, and clocks that do not run alike."""


class Membership:
    """From ``join`` to ``leave``. Methods that talk to discovery raise ControlUnavailableError, or LeaseLostError while
    there is no lease to put a key under.

    ``address`` gives the request plane's; ``on_lost`` and ``on_revoked`` are the lease's. ``withdraw`` returns when no
    transfer of ours moves any more: peers that lost sight of our memory take their blocks back when they find it again.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        engine: EngineHost,
        discovery: Discovery,
        *,
        transport_name: str,
        address: Callable[[], str],
        on_lost: Callable[[], None],
        on_revoked: Callable[[], None],
        withdraw: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings = settings
        self._engine = engine
        self._discovery = discovery
        self._keys = Keys(settings.control.namespace)
        self._transport_name = transport_name
        self._address = address
        self._on_lost = on_lost
        self._on_revoked = on_revoked
        self._withdraw = withdraw
        self._entries: dict[str, bytes] = {}
        """What stands in discovery by our will."""
        self._disturbed = asyncio.Event()
        self.term = 0
        """Raised when everything that was begun before is withdrawn: peers may take back what we were given then."""
        self._term_raised = asyncio.Event()
        self.kv_compatibility = Compatibility(
            model=settings.model,
            weights_fingerprint=engine.facts.weights_fingerprint,
            shape=engine.facts.kv_layout.shape,
            hash_seed=HASH_SEED,
            protocol=PROTOCOL_VERSION,
        ).digest()
        """What two workers must share to exchange KV."""
        self._lease: Lease | None = None
        self._agent = b""
        self._is_listed = False

    @property
    def lease_id(self) -> str:
        """Empty before ``join``."""
        return "" if self._lease is None else self._lease.lease_id

    @property
    def is_listed(self) -> bool:
        """Whether others find this worker in the list, as far as it knows without asking."""
        return self._is_listed and self._is_alive

    def fence_s(self) -> float:
        """Until when a write may be posted, by the monotonic clock. From any thread."""
        lease = self._lease
        return -math.inf if lease is None else lease.alive_until_s - lease.ttl_s * FENCE_MARGIN_SHARE

    async def join(self, agent: bytes) -> None:
        """Begin the lease and say where the KV memory lies. ``agent`` is the transport's connection blob."""
        self._agent = agent
        self._lease = await self._discovery.grant(self._settings.control.lease_ttl_s)
        self._lease.on_lost(self._lose)
        self._lease.on_revoked(self._entries.clear)
        self._lease.on_revoked(self._on_revoked)
        await self._publish_memory(self._lease)

    def _lose(self) -> None:
        """What is begun from now on belongs to another term, which begins in discovery when the old one has stopped."""
        self.term += 1
        self._on_lost()
        self._term_raised.set()

    async def keep_term(self) -> None:
        """Without end: after each loss of the lease, withdraw what was begun before, then register in the new term.

        When peers find our memory in another term they take back what we were allowed to write: none of that may still
        move.
        """
        while True:
            await self._term_raised.wait()
            self._term_raised.clear()
            await self._withdraw()
            while not self._term_raised.is_set() and self._lease is not None:
                try:
                    await self._publish_memory(self._lease)
                    break
                except (ControlUnavailableError, LeaseLostError) as exc:
                    _log.debug("cannot publish the KV metadata: %s", exc)
                await asyncio.sleep(TERM_RETRY_INTERVAL_S)

    async def register(self, role: WorkerRole, epoch: int) -> None:
        """Enter the list of workers, or change the entry."""
        key = self._keys.worker(self._settings.worker_id)
        await self._put(key, msgspec.json.encode(self._info(role, epoch)))
        self._is_listed = True

    async def unlist(self) -> None:
        """Get no new work."""
        self._is_listed = False
        key = self._keys.worker(self._settings.worker_id)
        self._entries.pop(key, None)
        await self._discovery.delete(key)

    async def leave(self) -> None:
        """End the lease: to be called when nothing of ours moves any more. While discovery is away it runs out."""
        self._entries.clear()
        if self._lease is None:
            return
        try:
            await self._lease.revoke()
        except ControlUnavailableError as exc:
            _log.warning("cannot revoke the lease, it runs out by itself: %s", exc)

    async def _publish_memory(self, lease: Lease) -> None:
        metadata = self._metadata(lease.ttl_s)
        key = self._keys.worker_kv_metadata(metadata.worker_id, metadata.rank)
        await self._put(key, msgspec.json.encode(metadata))

    async def _put(self, key: str, value: bytes) -> None:
        await self._discovery.put(key, value, self._lease)
        self._entries[key] = value

    # -- what others do to our entries ----------------------------------------------------------------------------

    async def keep_entries(self) -> None:
        """Without end: put back what others have changed or deleted, an operator's slip or an attacker's deed."""
        own = (self._keys.worker(self._settings.worker_id), f"{self._keys.kv_metadata}{self._settings.worker_id}/")
        watches = [asyncio.create_task(follow(self._discovery, prefix, self._notice)) for prefix in own]
        try:
            while True:
                await self._disturbed.wait()
                # Not at once: our own lease puts its keys again after a gap, and a loop of two writers stays slow.
                await asyncio.sleep(RESTORE_DELAY_S)
                self._disturbed.clear()
                await self._restore()
        finally:
            await end_tasks(watches)

    def _notice(self, event: WatchEvent) -> None:
        wanted = self._entries.get(event.key)
        if wanted is not None and (event.kind is WatchKind.DELETE or event.value != wanted):
            self._disturbed.set()

    async def _restore(self) -> None:
        for key, wanted in list(self._entries.items()):
            try:
                found = await self._discovery.get(key)
                if found == wanted or self._entries.get(key) is not wanted or not self._is_alive:
                    continue
                _log.warning("somebody has changed or deleted our discovery entry %s: putting it back", key)
                if found is None and key.startswith(self._keys.kv_metadata):
                    # Peers saw it go, as if our lease had ended.
                    self.term += 1
                    self._term_raised.set()
                elif self._entries.get(key) is wanted:
                    await self._put(key, wanted)
            except (ControlUnavailableError, LeaseLostError) as exc:
                _log.debug("cannot restore %s: %s", key, exc)
                self._disturbed.set()

    @property
    def _is_alive(self) -> bool:
        return self._lease is not None and self._lease.alive_until_s > time.monotonic()

    def _info(self, role: WorkerRole, epoch: int) -> WorkerInfo:
        settings, facts = self._settings, self._engine.facts
        return WorkerInfo(
            worker_id=settings.worker_id,
            epoch=epoch,
            role=role,
            model=settings.model,
            model_path=settings.model_path,
            address=self._address(),
            max_model_len=facts.max_model_len,
            block_size=facts.kv_layout.block_size,
            num_blocks=facts.num_blocks,
            vocab_size=facts.vocab_size,
            kv_compatibility=self.kv_compatibility,
            host=socket.gethostname(),
            pid=os.getpid(),
            engine=settings.engine_kind,
            transport=self._transport_name,
            max_num_seqs=settings.engine.max_num_seqs,
            public_key=settings.public_key,
            weights_fingerprint=facts.weights_fingerprint,
            tokenizer_fingerprint=settings.tokenizer_fingerprint,
            lease_ttl_s=settings.control.lease_ttl_s,
        )

    def _metadata(self, lease_ttl_s: float) -> KvMetadata:
        region = self._engine.kv_region
        return KvMetadata(
            worker_id=self._settings.worker_id,
            rank=0,
            transport=self._transport_name,
            agent=self._agent,
            address=region.address,
            num_bytes=region.num_bytes,
            block_bytes=self._engine.facts.kv_layout.block_bytes,
            device=region.device,
            device_id=region.device_id,
            kv_compatibility=self.kv_compatibility,
            layout=self._engine.facts.kv_layout,
            public_key=self._settings.public_key,
            lease_ttl_s=lease_ttl_s,
            term=self.term,
        )
