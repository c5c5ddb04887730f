"""This worker's entries in discovery: its lease, its KV memory, its entry in the list of workers.

    join()       the lease begins, kv_metadata/ID/0 appears    peers can reach our memory
    register()   workers/ID appears, or changes                frontends and peers send work
    unlist()     workers/ID disappears                         no new work; hand-offs continue
    leave()      the lease ends, all entries disappear         peers reuse the blocks that we were allowed to write

If another process changes or deletes these entries while the lease lives, they are restored (``keep_entries``).

It does not know when these calls are due, nor what must end when the lease is lost.
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

from kvrelay.config import WorkerConfig, WorkerRole
from kvrelay.control.base import Discovery, Keys, Lease, WatchEvent, WatchKind
from kvrelay.control.following import follow
from kvrelay.core.hashing import HASH_SEED
from kvrelay.core.layout import Compatibility
from kvrelay.core.messages import PROTOCOL_VERSION
from kvrelay.core.tasks import end_tasks
from kvrelay.core.workers import KvMetadata, WorkerInfo
from kvrelay.engine.contract import EngineHost
from kvrelay.errors import ControlUnavailableError, LeaseLostError
from kvrelay.version import __version__
from kvrelay.worker.identity import WorkerIdentity
from kvrelay.worker.inspection import LeaseView

_log = logging.getLogger(__name__)

RETRY_INTERVAL_S = 0.5
TERM_RETRY_INTERVAL_S = 0.05
RESTORE_DELAY_S = 1.0
FENCE_MARGIN_SHARE = 0.1
"""Share of a lease's time to live: the last byte must be posted this long before the lease ends. Covers a post that
blocks for its copy, and clocks of different speed."""


class Membership:
    """From ``join`` to ``leave``. Methods that talk to discovery raise ControlUnavailableError, or LeaseLostError while
    there is no lease to put a key under.

    ``address`` returns the request plane's address; ``on_lost`` and ``on_revoked`` are callbacks of the lease.
    ``withdraw`` returns when no transfer of ours moves any more: peers that missed our entry take their blocks back
    when it reappears.
    """

    def __init__(
        self,
        settings: WorkerConfig,
        identity: WorkerIdentity,
        engine: EngineHost,
        discovery: Discovery,
        *,
        transport_name: str,
        address: Callable[[], str],
        on_lost: Callable[[], None],
        on_revoked: Callable[[], None],
        withdraw: Callable[[], Awaitable[None]],
    ) -> None:
        self._settings, self._identity = settings, identity
        self._engine = engine
        self._discovery = discovery
        self._keys = Keys(settings.control.namespace)
        self._transport_name = transport_name
        self._address = address
        self._on_lost = on_lost
        self._on_revoked = on_revoked
        self._withdraw = withdraw
        self._entries: dict[str, bytes] = {}
        """The entries that should be in discovery."""
        self._writing = asyncio.Lock()
        """Held while an entry is written: one that is put back must not overtake a change."""
        self._disturbed = asyncio.Event()
        self.term = 0
        """Incremented when everything begun before is withdrawn: peers may then reuse blocks that they had granted
        us."""
        self._term_raised = asyncio.Event()
        self.kv_terms = Compatibility(
            model=settings.model,
            weights_fingerprint=engine.facts.weights_fingerprint,
            regions=engine.facts.kv_layout.model,
            hash_seed=HASH_SEED,
            protocol=PROTOCOL_VERSION,
            adapter=engine.facts.adapter,
        )
        self.kv_compatibility = self.kv_terms.digest()
        """The digest that two workers must share to exchange KV."""
        self.adapters = engine.facts.adapters
        """The ids of those that requests may ask for; published with the next ``register``."""
        self.refused_adapters: dict[str, str] = {}
        """Those that could not be loaded, by id, with the reasons."""
        self._lease: Lease | None = None
        self._agent = b""
        self._is_listed = False

    @property
    def lease_id(self) -> str:
        """Empty before ``join``."""
        return "" if self._lease is None else self._lease.lease_id

    @property
    def is_listed(self) -> bool:
        """Whether this worker is in the list of workers, by local knowledge."""
        return self._is_listed and self._is_alive

    def view(self) -> LeaseView:
        """The lease as it is now."""
        return LeaseView(self.lease_id, self.term, self.is_listed, self.fence_s())

    def fence_s(self) -> float:
        """The monotonic time until which writes may be posted. From any thread."""
        lease = self._lease
        return -math.inf if lease is None else lease.alive_until_s - lease.ttl_s * FENCE_MARGIN_SHARE

    async def join(self, agent: bytes) -> None:
        """Begin the lease and publish the KV memory. ``agent`` is the transport's connection blob."""
        self._agent = agent
        self._lease = await self._discovery.grant(self._settings.control.lease_ttl_s)
        self._lease.on_lost(self._lose)
        self._lease.on_revoked(self._entries.clear)
        self._lease.on_revoked(self._on_revoked)
        await self._publish_memory(self._lease)

    def _lose(self) -> None:
        """Start another term for everything begun from now on. It is registered once everything of the old term has
        stopped."""
        self.term += 1
        self._on_lost()
        self._term_raised.set()

    async def keep_term(self) -> None:
        """Runs for ever: after each loss of the lease, withdraw everything begun before, then register in the new
        term.

        When peers find our memory in another term, they reuse the blocks that we were allowed to write. So no write may
        still be in flight.
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

    async def register(self, role: WorkerRole, epoch: int, *, pulls_prefills: bool) -> None:
        """Enter the list of workers, or change the entry."""
        key = self._keys.worker(self._identity.worker_id)
        await self._put(key, msgspec.json.encode(self._info(role, epoch, pulls_prefills=pulls_prefills)))
        self._is_listed = True

    async def unlist(self) -> None:
        """Leave the list of workers, to get no new work."""
        self._is_listed = False
        key = self._keys.worker(self._identity.worker_id)
        async with self._writing:
            self._entries.pop(key, None)
            await self._discovery.delete(key)

    async def leave(self) -> None:
        """End the lease. Call it when no transfer of ours moves any more. If discovery is away, the lease expires."""
        self._entries.clear()
        if self._lease is None:
            return
        try:
            await self._lease.revoke()
        except ControlUnavailableError as exc:
            _log.warning("cannot revoke the lease (%s); it will expire", exc)

    async def _publish_memory(self, lease: Lease) -> None:
        metadata = self._metadata(lease.ttl_s)
        key = self._keys.worker_kv_metadata(metadata.worker_id, metadata.rank)
        await self._put(key, msgspec.json.encode(metadata))

    async def _put(self, key: str, value: bytes) -> None:
        async with self._writing:
            await self._discovery.put(key, value, self._lease)
            self._entries[key] = value

    # -- what others do to our entries ----------------------------------------------------------------------------

    async def keep_entries(self) -> None:
        """Runs for ever: restore entries that others have changed or deleted, by mistake or by attack."""
        own = (self._keys.worker(self._identity.worker_id), f"{self._keys.kv_metadata}{self._identity.worker_id}/")
        watches = [asyncio.create_task(follow(self._discovery, prefix, self._notice)) for prefix in own]
        try:
            while True:
                await self._disturbed.wait()
                # Delayed: our own lease restores its keys after a gap, and a loop of two writers stays slow.
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
        for key in list(self._entries):
            try:
                async with self._writing:
                    await self._restore_one(key)
            except (ControlUnavailableError, LeaseLostError) as exc:
                _log.debug("cannot restore %s: %s", key, exc)
                self._disturbed.set()

    async def _restore_one(self, key: str) -> None:
        found, wanted = await self._discovery.get(key), self._entries.get(key)
        if wanted is None or found == wanted or not self._is_alive:
            return
        _log.warning("discovery entry %s was changed or deleted by another process; restoring it", key)
        if found is None and key.startswith(self._keys.kv_metadata):
            # To peers this looked like the end of our lease.
            self.term += 1
            self._term_raised.set()
        else:
            await self._discovery.put(key, wanted, self._lease)

    @property
    def _is_alive(self) -> bool:
        return self._lease is not None and self._lease.alive_until_s > time.monotonic()

    def _info(self, role: WorkerRole, epoch: int, *, pulls_prefills: bool) -> WorkerInfo:
        settings, facts = self._settings, self._engine.facts
        return WorkerInfo(
            worker_id=self._identity.worker_id,
            epoch=epoch,
            role=role,
            pulls_prefills=pulls_prefills,
            model=settings.model,
            model_path=str(settings.model_path),
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
            public_key=self._identity.public_key,
            weights_fingerprint=facts.weights_fingerprint,
            tokenizer_fingerprint=self._identity.tokenizer_fingerprint,
            lease_ttl_s=settings.control.lease_ttl_s,
            dp_group=self._identity.dp_group,
            dp_rank=settings.group.rank,
            dp_size=settings.group.dp,
            dp_parent_pid=os.getppid() if settings.group.dp > 1 else 0,
            release=__version__,
            reads_prefixes=facts.has_open_cache and settings.transfer.fetch_prefixes,
            adapter=facts.adapter,
            adapters=self.adapters,
            max_adapters=facts.max_adapters,
            refused_adapters=self.refused_adapters,
            after_crash=self._identity.after_crash,
        )

    def _metadata(self, lease_ttl_s: float) -> KvMetadata:
        region = self._engine.kv_region
        return KvMetadata(
            worker_id=self._identity.worker_id,
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
            terms=self.kv_terms,
            public_key=self._identity.public_key,
            lease_ttl_s=lease_ttl_s,
            term=self.term,
        )
