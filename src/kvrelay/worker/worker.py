"""A worker: an engine that joined the cluster.

Life: build the engine -> bind the request plane -> register KV memory -> register in discovery under a lease -> serve
-> drain -> leave. The role is state: ``set_role`` opens one door and closes another (``roles.py``).

When a worker leaves or loses its lease, it first stops all its transfers. Only then may others count it as gone,
because from then on they reuse the blocks that it was allowed to write.
"""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import asdict

import msgspec

from kvrelay.config import WorkerConfig, WorkerRole
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.activity import Activity
from kvrelay.core.clock import MonotonicClock
from kvrelay.core.event_log import KvEventLog
from kvrelay.core.events import LoadMetrics
from kvrelay.core.handoff import HandoffId
from kvrelay.core.messages import AdminReply, AdminRequest
from kvrelay.core.process_usage import ProcessUsage
from kvrelay.core.sealing import new_secret
from kvrelay.core.step_cost import StepCost
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.contract import Engine, EngineHost, LoadsAdapters, require
from kvrelay.engine.kv_source import SourceBeyond
from kvrelay.engine.stats import EngineStats
from kvrelay.engine.step import StepOutput
from kvrelay.errors import ConfigError, KvrelayError
from kvrelay.handoff.decode_events import PushFailed
from kvrelay.placement.threshold import DisaggPolicy
from kvrelay.rpc.base import RpcServer
from kvrelay.transfer.base import Transport
from kvrelay.transfer.rates import TransferRates
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.checksums import BlockChecksums
from kvrelay.worker.cluster.adapters import WorkerAdapters
from kvrelay.worker.cluster.callers import Callers
from kvrelay.worker.cluster.membership import Membership
from kvrelay.worker.cluster.memory import PeerMemory
from kvrelay.worker.cluster.peer_events import PeerEvents
from kvrelay.worker.cluster.peers import PeerTable
from kvrelay.worker.decode.refusals import Refusals
from kvrelay.worker.decode.serving import DecodeSide
from kvrelay.worker.identity import WorkerIdentity
from kvrelay.worker.inbox import Inbox
from kvrelay.worker.inspection import Inspection, QueueView, snapshot
from kvrelay.worker.marking import WorkerMarks
from kvrelay.worker.prefill.connections import Connect, DecodePeers
from kvrelay.worker.prefill.paired import PairedPrefills
from kvrelay.worker.prefill.pulling import PrefillSide
from kvrelay.worker.prefixes import PeerPrefixes
from kvrelay.worker.reporting.metrics import WorkerStats
from kvrelay.worker.reporting.publisher import Publisher
from kvrelay.worker.reporting.stats import activity_of, by_reason, copied
from kvrelay.worker.roles import FIRST_EPOCH, Roles
from kvrelay.worker.runtime import follow_settings, warn_of_settings_in_vain
from kvrelay.worker.shutdown import Shutdown
from kvrelay.worker.surroundings import Surroundings
from kvrelay.worker.watchdog import Watchdog

_log = logging.getLogger(__name__)

ADMIN_COMMANDS = ("status", "drain", "role", "check_integrity", "cache", "clear_cache")
GIVE_UP_LEASES = 3.0
"""A drain waits for peers this many times the lease's time to live: long enough to fence a dead peer."""


class Worker:
    """Connects an engine to the planes. All its parts come by constructor.

    ``decode``, ``prefill`` and ``transfer`` are its two sides and the thread that moves their KV. ``inspect`` shows all
    of it at one moment. ``is_routed`` False: it is the only choice, so it publishes neither cache events nor new loads.
    """

    def __init__(
        self,
        settings: WorkerConfig,
        identity: WorkerIdentity,
        engine: EngineHost,
        transport: Transport,
        control: ControlPlane,
        server: RpcServer,
        connect: Connect,
        is_routed: bool = True,
    ) -> None:
        self.settings, self.identity = settings, identity
        self._engine, self._is_routed = engine, is_routed
        self._control, self._server = control, server
        self._keys = Keys(settings.control.namespace)
        self._shutdown = Shutdown()
        self._tasks = TaskSet()
        self._callers = Callers(control.discovery, self._keys, is_open=not self.identity.public_key)
        self._peer_events = PeerEvents(engine, self._callers)
        self._membership = self._build_membership(transport.name)
        self.transfer = TransferThread(
            transport, settings.transfer, fence=self._membership.fence_s, on_failed=self._shutdown.transfer_failed
        )
        self._checksums = BlockChecksums(engine, required=settings.transfer.kv_checksums)
        self._secret = new_secret() if self.identity.public_key else b""
        self._usage = ProcessUsage()
        self._transfer_rates = TransferRates(max(engine.facts.token_bytes, 1))
        self._publisher = self._build_publisher()
        self._watchdog = Watchdog(
            self._engine.progress, settings.engine.step_timeout_s, self._shutdown.fail, MonotonicClock()
        )
        self._policy = DisaggPolicy(settings.disagg, step_costs=engine.facts.step_costs)
        self._peer_table = self._build_peer_table(transport)
        self._peers = self._build_peers(connect)
        self._memory = PeerMemory(
            engine.facts.kv_layout,
            self.transfer,
            lambda worker_id: self._peers.kv_metadata(worker_id, self._membership.kv_terms),
        )
        self._refusals = Refusals(server)
        self._marks = WorkerMarks(identity.worker_id, is_on=settings.metrics.request_marks)
        around = self._build_surroundings()
        self.prefill = PrefillSide(around, self._compute_here)
        self._paired = PairedPrefills(around, self.prefill.handoffs, self._peer_table.address_of)
        self.decode = DecodeSide(
            around,
            self._policy,
            num_prefill_workers=self._num_prefill_workers,
            is_on_prefill_side=lambda adapter: adapter in self._peer_table.prefill_adapters,
            num_serving=lambda: self._peer_table.num_serving,
            give_up_after_s=GIVE_UP_LEASES * settings.control.lease_ttl_s,
        )
        self._prefixes = self._build_prefixes(around)
        self._peer_events.attach(self.transfer, self._memory, self.decode, self.prefill)
        self._roles = Roles(
            around, self.prefill, self._paired, self.decode, is_leaving=self._shutdown.has_begun, tasks=self._tasks
        )
        self._inbox = self._build_inbox(around)
        self.transfer.on_notification(self.decode.handoffs.notified)

    def _build_membership(self, transport_name: str) -> Membership:
        settings = self.settings
        return Membership(
            settings,
            self.identity,
            self._engine,
            self._control.discovery,
            transport_name=transport_name,
            address=lambda: self._server.address,
            on_lost=self._peer_events.lease_lost,
            on_revoked=self._on_lease_revoked,
            withdraw=self._peer_events.withdraw,
        )

    def _build_peer_table(self, transport: Transport) -> PeerTable:
        return PeerTable(
            self._control.discovery,
            self._keys,
            self.settings.model,
            self._membership.kv_terms,
            on_registered=self._peer_events.registered,
            on_ended=self._peer_events.lease_ended,
            on_no_prefill=self._peer_events.no_prefill_worker,
            transfer=self.transfer if transport.has_bar else None,
        )

    def _build_peers(self, connect: Connect) -> DecodePeers:
        return DecodePeers(
            connect,
            self._control.discovery,
            self._keys,
            on_message=self._peer_events.message,
            on_lost=self._peer_events.connection_lost,
            address_of=self._peer_table.address_of,
        )

    def _build_surroundings(self) -> Surroundings:
        return Surroundings(
            self.settings,
            self.identity,
            self._engine,
            self._control,
            self._server,
            self._membership,
            self.transfer,
            self._checksums,
            self._peers,
            self._memory,
            self._refusals,
            self._marks,
        )

    def _build_inbox(self, around: Surroundings) -> Inbox:
        return Inbox(
            around,
            self._callers,
            self.decode,
            self._paired,
            run_command=self.run_admin_command,
            publish_secret=self._secret,
            activity=lambda: self.activity(self._engine.stats()),
            tasks=self._tasks,
        )

    def _build_prefixes(self, around: Surroundings) -> PeerPrefixes | None:
        """None if this worker neither reads nor lends prefixes."""
        if not self._engine.facts.has_open_cache:
            _log.info("other workers' prefixes are not read: engine %s keeps its own cache", self.settings.engine_kind)
        elif self.settings.record_steps:
            _log.info("other workers' prefixes are not read: what comes from elsewhere cannot be recorded")
            return None
        elif self.settings.transfer.fetch_prefixes:
            return PeerPrefixes(
                self.identity.worker_id,
                self._engine.facts.kv_layout,
                self.prefill.handoffs,
                term=lambda: around.term,
                cost=lambda: self._engine.stats().load.step_cost or StepCost(),
            )
        self.decode.handoffs.lends_prefixes = False
        return None

    def _build_publisher(self) -> Publisher:
        return Publisher(
            self.identity.worker_id,
            self._control.events,
            self._keys,
            KvEventLog(self.identity.worker_id, FIRST_EPOCH),
            step_age_s=lambda: self._engine.progress.age_s,
            secret=self._secret,
            complete=self._complete,
        )

    def _complete(self, load: LoadMetrics) -> LoadMetrics:
        """The sample with what was moved, what moving costs, and what was computed and decided."""
        engine, transfer = self._engine.stats(), self.transfer.stats()
        of_tiers = () if engine.tiers is None else engine.tiers.load_costs
        return msgspec.structs.replace(
            load,
            transfer_costs=self._transfer_rates.update(transfer.peers),
            flows=transfer.flows(),
            load_costs=of_tiers if self._prefixes is None else (*of_tiers, self._prefixes.load_cost()),
            avoided=self._avoided(),
            tokens=engine.tokens,
            activity=self.activity(engine),
        )

    def activity(self, engine: EngineStats) -> Activity:
        """What this worker has done since its start. Waits for nothing."""
        return activity_of(
            engine,
            self.decode.stats,
            self.decode.grants.times,
            None if self._prefixes is None else self._prefixes.stats(),
            self._engine.facts.kv_layout.block_size,
            self._usage.read(),
        )

    # -- life ---------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind, register, appear in discovery. Raises ControlUnavailableError or AddressInUseError."""
        self._server.on_message(self._inbox.receive)
        self._server.on_peer_gone(self._inbox.peer_gone)
        if self.identity.public_key:
            self._server.admit_by(self._callers.admit)
        await self._server.start()
        self.transfer.start()
        registered = self.transfer.register(self._engine.kv_region, kv_compatibility=self._membership.kv_compatibility)
        agent = await asyncio.wrap_future(registered)
        self._engine.start(self._on_step, self._shutdown.fail, samples_load=self._is_routed)
        if self._prefixes is not None:
            self._add_source(self._prefixes)
        self._marks.watch()
        self._engine.post(lambda _: self._marks.watch())
        self._watchdog.start()
        await self._membership.join(agent)
        await self._publisher.start(await self._engine.call(lambda core: core.metrics()))
        self._peer_table.start()
        self._callers.start()
        if self.role.takes_requests:
            warn_of_settings_in_vain(self._policy)
        self._tasks.spawn(follow_settings(self._control.discovery, self._keys, self._policy))
        self._tasks.spawn(self._membership.keep_entries())
        self._tasks.spawn(self._membership.keep_term())
        await self._roles.begin()
        if self._engine.facts.max_adapters and isinstance(self._engine, LoadsAdapters):
            adapters = WorkerAdapters(self._engine, self._membership, self.settings.model, self._roles.publish)
            self._tasks.spawn(adapters.watch(self._control.discovery, self._keys))
            self._tasks.spawn(adapters.keep())

    def _add_source(self, source: SourceBeyond) -> None:
        engine = self._engine
        source.start(lambda *ended: engine.post(lambda core: require(core.schedules).kv_loaded(*ended)))
        engine.post(lambda core: require(core.schedules).add_source(source))

    async def run(self) -> None:
        """Serve until ``request_drain``; then drain and leave. Raises FatalError, for example EngineDeadError, after a
        fatal failure, before or during the drain."""
        await self._shutdown.begun()
        try:
            await self._shutdown.run_unless_failed(self._roles.drain())
        finally:
            await self.close()
        if self._shutdown.failure is not None:
            raise self._shutdown.failure

    def request_drain(self) -> None:
        """Begin to leave; ``run`` returns when everything in flight has ended."""
        self._shutdown.begin()

    async def close(self) -> None:
        """Leave discovery and free everything, also with work in flight."""
        await self._tasks.close()
        self.decode.accepting = self._paired.accepting = False
        if self._shutdown.failure is not None:
            # Nothing finishes any more: let waiting clients migrate now.
            await self._server.close()
        self.transfer.fail_all("the worker leaves")
        await self.prefill.close()
        await asyncio.to_thread(self.transfer.close)
        await self._membership.leave()
        await self._peer_table.close()
        await self._callers.close()
        await self._publisher.close()
        await self.decode.close()
        await self._memory.close()
        await self._peers.close()
        await self._server.close()
        await asyncio.to_thread(self._checksums.close)
        if await asyncio.to_thread(self._engine.close, self._shutdown.engine_join_s):
            self._watchdog.stop()
        self._marks.close()

    # -- role ---------------------------------------------------------------------------------------------------------

    @property
    def role(self) -> WorkerRole:
        return self._roles.role

    @property
    def epoch(self) -> int:
        """How often the role has changed."""
        return self._roles.epoch

    async def set_role(self, role: WorkerRole, was: WorkerRole | None = None) -> None:
        """Continue in another role (``Roles.change``)."""
        await self._roles.change(role, was)

    def _compute_here(self, handoff_id: HandoffId) -> None:
        self.decode.handoffs.handle(PushFailed(handoff_id))

    def _num_prefill_workers(self) -> int:
        """The number of workers that may take over a prefill of this worker: others refuse, or are refused."""
        is_alone = self.role is WorkerRole.PREFILL or not self._engine.facts.hands_over_kv
        # A widened worker is in the table, too.
        num_others = 0 if is_alone else self._peer_table.num_prefill_workers - self._roles.pulls_prefills
        return max(num_others - len(self._avoided()), 0)

    def _avoided(self) -> tuple[str, ...]:
        """The prefill workers whose claims this worker refuses, because they have failed it."""
        return self.decode.handoffs.avoided_of(self._peer_table.prefill_ids)

    # -- what arrives -------------------------------------------------------------------------------------------------

    async def run_admin_command(self, message: AdminRequest) -> AdminReply:
        """Run an operator's command. The reply to an unknown one, or to one that fails, carries the reason."""
        try:
            payload = await self._perform(message)
        except (KvrelayError, ValueError) as exc:
            return AdminReply(message.nonce, error=str(exc))
        return AdminReply(message.nonce, payload=msgspec.json.encode(payload).decode())

    async def _perform(self, message: AdminRequest) -> object:
        match message.command:
            case "status":
                return await self.status()
            case "drain":
                self.request_drain()
                return {"draining": True}
            case "role":
                role, _, was = message.argument.partition(" from ")
                await self.set_role(WorkerRole(role), was=WorkerRole(was) if was else None)
                return {"role": self.role, "epoch": self.epoch}
            case "check_integrity":
                self.check_integrity()
                return await self._engine.call(_integrity)
            case "cache":
                hashes = await self._engine.call(lambda core: core.cached_hashes())
                return {"blocks": [f"{block:016x}" for block in hashes]}
            case "clear_cache":
                await self._engine.call(lambda core: core.clear_cache())
                return {"cleared": True}
        raise ConfigError(f"unknown admin command {message.command}; known are {', '.join(ADMIN_COMMANDS)}")

    def _on_step(self, step: StepOutput) -> None:
        """On the engine thread, after every step that has put out something."""
        for request_id, numbers in step.marks:
            self._marks.put(request_id, numbers)
        if step.outputs:
            self.decode.hand_on(step.outputs)
        self.decode.handoffs.on_step(step)
        self.prefill.handoffs.on_step(step)
        if self._is_routed and (step.kv_events or step.load is not None):
            self._publisher.update(step.kv_events, step.load)

    def _on_lease_revoked(self) -> None:
        """An operator wants this worker to leave. The effects of the lost lease have been handled."""
        _log.warning("lease revoked: draining")
        self.request_drain()

    # -- what it says of itself ---------------------------------------------------------------------------------------

    def inspect(self) -> Inspection:
        """What this worker holds and knows now. Waits neither for the engine nor for a server, and changes nothing.
        On the event loop."""
        incoming, outgoing = self.decode.handoffs, self.prefill.handoffs
        return Inspection(
            stats=self.stats(),
            is_accepting=self.decode.accepting,
            is_pairing=self._paired.accepting,
            is_stalled=self.is_stalled,
            step_age_s=self._engine.progress.age_s,
            lease=self._membership.view(),
            peers=self._peer_table.view(),
            queue=QueueView(self.prefill.is_pulling, self.prefill.num_handoffs, *self.decode.failed_push),
            incoming=incoming.read(lambda: snapshot(incoming.ledger.handoffs.values())),
            outgoing=outgoing.read(lambda: snapshot(outgoing.ledger.handoffs.values())),
            loans=self._engine.peek(lambda engine: engine.lends.writable_blocks() if engine.lends else {}),
            num_requests=self.decode.num_requests,
            num_paired=self._paired.num_waiting,
            disagg=self._policy.config,
            kv_compatibility=self._membership.kv_compatibility,
            avoided=incoming.read(incoming.avoided),
        )

    async def status(self) -> dict[str, object]:
        """The full status for operators, as JSON values, when the engine has taken in what it was sent before."""
        load = await self._engine.call(lambda core: core.metrics())
        now = self.inspect()
        stats = now.stats
        prefill = msgspec.structs.asdict(stats.prefill)
        del prefill["ends"]
        return {
            "worker_id": stats.worker_id,
            "role": stats.role,
            "epoch": stats.epoch,
            "lease_id": now.lease.lease_id,
            "model": stats.model,
            "pid": os.getpid(),
            "dp_group": self.identity.dp_group,
            "dp_rank": self.settings.group.rank,
            "load": msgspec.to_builtins(load),
            "num_steps": stats.engine.tokens.num_steps,
            "step_spread": stats.engine.step_spread,
            "drafts": msgspec.to_builtins(stats.engine.drafts),
            "refused_adapters": self._membership.refused_adapters,
            "num_generated_tokens": stats.engine.tokens.num_generated,
            "step_age_s": now.step_age_s,
            "requests": now.num_requests,
            "handoffs_in": now.num_grants,
            "handoffs_out": now.queue.num_held,
            "refusals": stats.refusals,
            "recomputed": by_reason(stats.handoffs.ends),
            "prefills_ended": by_reason(stats.prefill.ends),
            "decode": msgspec.to_builtins(stats.decode),
            "prefill_queue_error": now.queue.push_error,
            "prefill_queue_error_age_s": now.queue.push_error_age_s,
            "prefill": prefill,
            "transfer": msgspec.to_builtins(stats.transfer),
            "prefixes": None if stats.prefixes is None else msgspec.to_builtins(stats.prefixes),
            "kv_holding": None if stats.engine.holding is None else stats.engine.holding._asdict(),
            "kv_tiers": None if stats.engine.tiers is None else msgspec.to_builtins(stats.engine.tiers),
            "disagg": asdict(now.disagg) | {"unused": self._policy.unused},
        }

    def check_integrity(self) -> None:
        """Check the parts besides the engine. Raises IntegrityError."""
        self.transfer.check_integrity()

    @property
    def is_ready(self) -> bool:
        """Whether this worker is in discovery (by local knowledge), is not leaving, and makes progress."""
        return self._membership.is_listed and not self._shutdown.has_begun() and not self.is_stalled

    @property
    def is_stalled(self) -> bool:
        """Whether the engine has been at one step for longer than the stall limit."""
        return self._watchdog.is_stalled

    def stats(self) -> WorkerStats:
        """All counts, at once: waits neither for the engine nor for a server."""
        decode = self.decode.handoffs.ledger
        return WorkerStats(
            worker_id=self.identity.worker_id,
            model=self.settings.model,
            engine_kind=self.settings.engine_kind,
            role=self.role,
            epoch=self.epoch,
            is_ready=self.is_ready,
            engine=self._engine.stats(),
            num_open_handoffs=decode.num_open,
            num_grants=decode.num_grants,
            handoffs=copied(decode.counters),
            decode=self.decode.counts(),
            prefill=copied(self.prefill.handoffs.ledger.counters),
            transfer=self.transfer.stats(),
            remote=self.decode.cost_stats(),
            refusals=dict(self._refusals.counts),
            num_unleased_entries=self._control.discovery.num_unleased,
            transfer_cost_error=self._transfer_rates.relative_error,
            transfer_durations=self.transfer.durations,
            prefixes=None if self._prefixes is None else self._prefixes.stats(),
            dp_group=self.identity.dp_group,
            dp_rank=self.settings.group.rank,
            claim_times=self.decode.grants.times,
        )


def _integrity(core: Engine) -> dict[str, object]:
    core.check_integrity()
    metrics = core.metrics()
    return {"ok": True, "blocks_in_use": metrics.num_blocks_in_use, "blocks": metrics.num_blocks}
