"""Injects the faults of a plan into a running cluster, and measures the time until all workers are back.

Faults may overlap, with one rule: one worker of each role stays untouched. So a fault against a role waits until the
one before it has healed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

from tests.chaos.answers import KnownPrompt
from tests.chaos.brokers import brokers_here
from tests.chaos.client import ChaosClient
from tests.chaos.cluster import ClusterUnderTest, Member
from tests.chaos.plan import ROLES, Fault, FaultKind
from tests.chaos.report import FaultRecord

from kvrelay.errors import FatalError, KvrelayError
from kvrelay.launch.children import Child

SWITCHED_S = 2.0
HELD_S = 6.0
"""So much longer under a planner: it decides every two seconds."""
"""How long a worker keeps its other role."""
OTHER = {"prefill": "decode", "decode": "prefill", "both": "decode"}
NUM_LEAVERS = 8
NATS, FRONTEND, PLANNER = "nats", "frontend", "planner"
"""Other targets that get only one fault at a time."""
NATS_GONE_S = 0.3
"""By then its supervisor has noticed, and the old connections are closed."""
NATS_FROZEN_LEASES = 1.5
MIN_FREEZE_LEASES = 0.5
MAX_FREEZE_LEASES = 4.0
"""Some freezes end before the request plane's heartbeats time out, some before the lease ends, some later."""


class FaultInjector:
    """Runs faults and records them. ``lease_ttl_s`` is the cluster's; ``burst_size`` must be above what it admits."""

    def __init__(
        self,
        cluster: ClusterUnderTest,
        client: ChaosClient,
        prompts: Sequence[KnownPrompt],
        lease_ttl_s: float,
        burst_size: int,
    ) -> None:
        self._cluster = cluster
        self._client = client
        self._lease_ttl_s = lease_ttl_s
        self._burst_size = burst_size
        self._short = [prompt for prompt in prompts if prompt.max_tokens <= 8]
        self._longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
        self._locks = {role: asyncio.Lock() for role in (*ROLES, NATS, FRONTEND, PLANNER)}
        self.records: list[FaultRecord] = []
        self.rank_death_s: list[float] = []
        """How long each worker outlived its killed rank."""

    async def run(self, fault: Fault) -> None:
        """Inject one fault and wait until it has healed. Problems are recorded, not raised."""
        began_s = time.monotonic()
        injections: dict[FaultKind, Callable[[Fault], Awaitable[None]]] = {
            FaultKind.KILL: self._kill,
            FaultKind.KILL_RANK: self._kill_rank,
            FaultKind.TERMINATE: self._replace,
            FaultKind.DRAIN: self._replace,
            FaultKind.REVOKE: self._replace,
            FaultKind.FREEZE: self._freeze,
            FaultKind.SWITCH_ROLE: self._switch_role,
            FaultKind.WIDEN: self._switch_role,
            FaultKind.KILL_FRONTEND: self._kill_frontend,
            FaultKind.KILL_NATS: self._kill_nats,
            FaultKind.FREEZE_NATS: self._freeze_nats,
            FaultKind.DISCONNECT: self._leave,
            FaultKind.CANCEL: self._leave,
            FaultKind.BURST: self._burst,
            FaultKind.KILL_BROKER: self._kill_broker,
            FaultKind.KILL_PLANNER: self._kill_planner,
        }
        try:
            await injections[fault.kind](fault)
        except* (KvrelayError, ProcessLookupError) as group:
            self._record(fault, began_s, problem="; ".join(str(exc) or repr(exc) for exc in group.exceptions))

    def _record(
        self, fault: Fault, at_s: float, recovery_s: float | None = None, problem: str = "", num_reconnected: int = 0
    ) -> None:
        self.records.append(FaultRecord(fault.name, at_s, time.monotonic(), recovery_s, problem, num_reconnected))

    def _record_healed(self, fault: Fault, at_s: float, recovery_s: float | None, num_reconnected: int = 0) -> None:
        """Returns None if it has not healed in time."""
        problem = f"the cluster was not whole again after {self._cluster.heal_timeout_s:.0f} s"
        self._record(fault, at_s, recovery_s, problem if recovery_s is None else "", num_reconnected)

    async def _heal(
        self, fault: Fault, at_s: float, roles: Sequence[str], *, since_s: float | None = None, num_away: int = 0
    ) -> None:
        """Record the time from ``since_s`` (default: the fault) until the roles are whole again."""
        start_s = time.monotonic()
        waited_s = await self._cluster.until_whole(roles, num_away)
        since_s = at_s if since_s is None else since_s
        self._record_healed(fault, at_s, None if waited_s is None else start_s + waited_s - since_s)

    @asynccontextmanager
    async def _alone(self, *names: str) -> AsyncIterator[None]:
        """No other fault strikes these roles meanwhile, and all their workers are present at the beginning. Under a
        planner a worker of one role may be one of the other soon, so the roles are one. Raises FatalError."""
        async with AsyncExitStack() as stack:
            for name in sorted({*names, *ROLES} if self._cluster.is_planned and set(names) & set(ROLES) else names):
                await stack.enter_async_context(self._locks[name])
            if await self._cluster.until_whole([name for name in names if name in ROLES]) is None:
                raise FatalError(
                    f"the cluster was not whole after {self._cluster.heal_timeout_s:.0f} s, before this fault"
                )
            yield

    @asynccontextmanager
    async def _stopped(self, pid: int, seconds: float) -> AsyncIterator[None]:
        """Stop the process for ``seconds``; the block begins when the process continues."""
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        yield

    # -- against workers ----------------------------------------------------------------------------------------------

    async def _victim(self, fault: Fault) -> Member:
        """A victim among at least two workers. Raises FatalError."""
        for _ in range(20):
            own = self._of_role(fault, await self._cluster.members())
            if len(own) > 1:
                return own[int(fault.choice * len(own))]
            await asyncio.sleep(0.2)
        raise FatalError(f"there was no {fault.role} worker to spare")

    def _of_role(self, fault: Fault, members: Sequence[Member]) -> list[Member]:
        """Those that the fault may strike. Under a planner: any but the only one that takes requests."""
        if not self._cluster.is_planned:
            return [member for member in members if member.role == fault.role]
        takers = [member for member in members if member.role != "prefill"]
        return [member for member in members if len(takers) > 1 or member not in takers]

    async def _kill(self, fault: Fault) -> None:
        async with self._alone(fault.role):
            victim = await self._victim(fault)
            at_s = time.monotonic()
            os.kill(victim.pid, signal.SIGKILL)
            if await self._cluster.until_exit(victim, 5.0) is not None and victim.is_extra:
                self._cluster.start_worker(fault.role)
            await self._heal(fault, at_s, [fault.role])

    async def _kill_rank(self, fault: Fault) -> None:
        """The worker must notice and end; then it is replaced as after its own death."""
        async with self._alone(fault.role):
            victim = await self._victim(fault)
            ranks = self._cluster.rank_pids(victim)
            at_s = time.monotonic()
            self._cluster.may_crash(victim)
            os.kill(ranks[int(fault.severity * len(ranks))], signal.SIGKILL)
            code = await self._cluster.until_exit(victim, self._cluster.heal_timeout_s)
            if code is None:
                self._record(fault, at_s, problem="the worker outlived its rank")
                return
            self.rank_death_s.append(time.monotonic() - at_s)
            if victim.is_extra:
                self._cluster.start_worker(fault.role)
            await self._heal(fault, at_s, [fault.role])

    async def _replace(self, fault: Fault) -> None:
        """Start a replacement by hand, then make the victim leave. The last child of ``serve`` of a role is not
        chosen."""
        async with self._alone(fault.role):
            victim = await self._victim_besides(fault, self._cluster.start_worker(fault.role))
            at_s = time.monotonic()
            if fault.kind is FaultKind.TERMINATE:
                os.kill(victim.pid, signal.SIGTERM)
            elif fault.kind is FaultKind.REVOKE:
                await self._order(self._cluster.revoke, victim.lease_id)
            else:
                await self._order(self._cluster.tell, victim.worker_id, "drain")
            code = await self._cluster.until_exit(victim, self._cluster.heal_timeout_s)
            if code == 0:
                await self._heal(fault, at_s, [fault.role])
                return
            late = f"was still there after {self._cluster.heal_timeout_s:.0f} s"
            how = late if code is None else f"ended with exit code {code}"
            self._record(fault, at_s, problem=f"the drained worker {how}")

    async def _order(self, give: Callable[..., Awaitable[None]], *arguments: str) -> None:
        """An admin command needs the control server, so none of its faults lasts meanwhile."""
        async with self._locks[NATS]:
            await give(*arguments)

    async def _victim_besides(self, fault: Fault, new: Child) -> Member:
        """A member other than the new one, once that has joined. ``serve`` keeps one child of each role: its last."""
        deadline = time.monotonic() + self._cluster.heal_timeout_s
        while time.monotonic() < deadline:
            self._cluster.start_failed_again()
            everyone = await self._cluster.members()
            members = self._of_role(fault, everyone)
            is_planned, counts = self._cluster.is_planned, self._cluster.num_workers
            present, wanted = (everyone, sum(counts.values())) if is_planned else (members, counts[fault.role])
            if len(present) > wanted:
                old = [member for member in members if member.pid != new.pid]
                is_last_child = sum(not member.is_extra for member in old) < 2
                choice = [member for member in old if member.is_extra or not is_last_child]
                return choice[int(fault.choice * len(choice))]
            await asyncio.sleep(0.2)
        raise FatalError("the replacement did not join")

    async def _freeze(self, fault: Fault) -> None:
        async with self._alone(fault.role):
            victim = await self._victim(fault)
            at_s = time.monotonic()
            num_leases = MIN_FREEZE_LEASES + fault.severity * (MAX_FREEZE_LEASES - MIN_FREEZE_LEASES)
            async with self._stopped(victim.pid, num_leases * self._lease_ttl_s):
                await self._heal(fault, at_s, [fault.role], since_s=time.monotonic())

    async def _switch_role(self, fault: Fault) -> None:
        """To the other role, or to both; and back."""
        async with self._alone(*ROLES):
            victim = await self._victim(fault)
            other = "both" if fault.kind is FaultKind.WIDEN else OTHER[victim.role]
            if other == victim.role:
                other = fault.role
            at_s = time.monotonic()
            try:
                await self._order(self._cluster.tell, victim.worker_id, "role", other)
                await asyncio.sleep(SWITCHED_S)
                if self._cluster.is_planned:
                    await self._require_role(victim, other)
            finally:
                back_s = time.monotonic()
                await self._order(self._cluster.tell, victim.worker_id, "role", victim.role)
                if self._cluster.is_planned:
                    await self._order(self._cluster.release, victim.worker_id)
            await self._heal(fault, at_s, ROLES, since_s=back_s)

    async def _require_role(self, victim: Member, role: str) -> None:
        """What was set by hand stays, whatever the planner does. Raises FatalError."""
        await asyncio.sleep(HELD_S)
        roles = {member.worker_id: member.role for member in await self._cluster.members()}
        if roles.get(victim.worker_id, role) != role:
            raise FatalError(f"{victim.worker_id} was made {role} by hand, and is {roles[victim.worker_id]}")

    # -- against frontends and the control server ---------------------------------------------------------------------

    async def _kill_frontend(self, fault: Fault) -> None:
        async with self._alone(FRONTEND):
            pids = self._cluster.frontend_pids()
            if not pids:
                raise FatalError("there is no frontend")
            num_reconnected = self._client.num_reconnected
            at_s = time.monotonic()
            with self._client.frontend_away():
                os.kill(pids[int(fault.choice * len(pids))], signal.SIGKILL)
                waited_s = await self._cluster.until_frontends_answer()
            self._record_healed(fault, at_s, waited_s, num_reconnected=self._client.num_reconnected - num_reconnected)

    async def _freeze_nats(self, fault: Fault) -> None:
        async with self._alone(NATS):
            at_s = time.monotonic()
            async with self._stopped(self._cluster.nats_pid(), NATS_FROZEN_LEASES * self._lease_ttl_s):
                await self._heal(fault, at_s, ROLES, since_s=time.monotonic(), num_away=1)

    async def _kill_nats(self, fault: Fault) -> None:
        async with self._alone(NATS):
            at_s = time.monotonic()
            os.kill(self._cluster.nats_pid(), signal.SIGKILL)
            await asyncio.sleep(NATS_GONE_S)
            # Another fault may have taken one worker of a role just now; the rest must be back in discovery.
            await self._heal(fault, at_s, ROLES, num_away=1)

    async def _kill_broker(self, fault: Fault) -> None:
        at_s = time.monotonic()
        killed = set(brokers_here())
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        deadline_s = at_s + self._cluster.heal_timeout_s
        # A killed process may still be seen for a moment.
        while not (new := set(brokers_here()) - killed) and time.monotonic() < deadline_s:
            await asyncio.sleep(0.1)
        self._record_healed(fault, at_s, time.monotonic() - at_s if new else None)

    async def _kill_planner(self, fault: Fault) -> None:
        async with self._alone(PLANNER):
            at_s = time.monotonic()
            for pid in self._cluster.planner_pids():
                os.kill(pid, signal.SIGKILL)
            waited_s = await self._cluster.until_planned()
            self._record_healed(fault, at_s, None if waited_s is None else time.monotonic() - at_s)

    # -- by clients ---------------------------------------------------------------------------------------------------

    async def _leave(self, fault: Fault) -> None:
        prompt = replace(self._longest, stream=True, max_tokens=1000)
        at_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(NUM_LEAVERS):
                # Prompts that no cache holds, so that clients leave in every stage of a prefill.
                own = replace(prompt, token_ids=(*prompt.token_ids[number + 1 :], *prompt.token_ids[: number + 1]))
                if fault.kind is FaultKind.DISCONNECT:
                    group.create_task(self._client.leave_after(own, 1 + 5 * number))
                else:
                    group.create_task(self._client.leave_within(own, 0.002 * 2**number * (0.5 + fault.severity)))
        self._record(fault, at_s)

    async def _burst(self, fault: Fault) -> None:
        at_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for number in range(self._burst_size):
                group.create_task(self._client.ask(self._short[number % len(self._short)], patient=False))
        self._record(fault, at_s)
