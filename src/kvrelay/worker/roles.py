"""A worker's role: which work it begins, and how that changes while it works.

The role is state; weights and KV pool stay. A worker has two doors: requests of frontends, and prefills for others.

    widen     a door opens, the entry in discovery changes in place: relief is there at once, and nothing waits
    narrow    the entry changes, the other door closes, and what came through it ends in its own time

A change from one half to the other is both, in this order. The worker never leaves discovery for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from kvrelay.config import WorkerConfig, WorkerRole
from kvrelay.core.cores import compute_threads, may_change_niceness, set_niceness
from kvrelay.core.handoff import LEAVING_LENDS_S
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.contract import Engine, EngineFacts, EngineHost
from kvrelay.errors import ConfigError, ControlUnavailableError, LeaseLostError, WorkerUnavailableError
from kvrelay.worker.cluster.membership import RETRY_INTERVAL_S
from kvrelay.worker.decode.serving import DecodeSide
from kvrelay.worker.prefill.paired import PairedPrefills
from kvrelay.worker.prefill.pulling import PrefillSide
from kvrelay.worker.shutdown import none_left
from kvrelay.worker.surroundings import Surroundings

_log = logging.getLogger(__name__)

FIRST_EPOCH = 0


def require_possible_role(role: WorkerRole, facts: EngineFacts) -> None:
    """Raises ConfigError if no hand-off reaches the engine's KV, or if the engine only does half of the work."""
    if role is WorkerRole.BOTH and not facts.prefills_here:
        raise ConfigError(
            "the server computes only prompts or only answers; use --role prefill or --role decode", param="role"
        )
    if role is not WorkerRole.BOTH and not facts.hands_over_kv:
        raise ConfigError(
            f"this worker cannot be a {role} worker: its engine hands no KV over (it computes elsewhere); use "
            "--role both",
            param="role",
        )


def niceness_of_prefills(settings: WorkerConfig, engine: EngineHost) -> int:
    """Of the engine's thread while the worker only prefills: a token that is late is seen, a prompt that takes a little
    longer is not. 0 if that thread does not compute alone, because a team is as slow as its last thread."""
    computes_alone = (
        settings.engine_kind == "torch"
        and not settings.computes_in_ranks
        and engine.kv_region.device == "cpu"
        and compute_threads(settings.runner.num_threads) == 1
    )
    return settings.runner.prefill_niceness if computes_alone and may_change_niceness() else 0


class Roles:
    """The current role and its changes, one at a time. ``is_leaving``: no role is entered any more."""

    def __init__(
        self,
        around: Surroundings,
        prefill: PrefillSide,
        paired: PairedPrefills,
        decode: DecodeSide,
        *,
        is_leaving: Callable[[], bool],
        tasks: TaskSet,
    ) -> None:
        self.role = around.settings.role
        self.pulls_prefills = self.role.pulls_prefills
        """Whether prefills come here by the queue: for a prefill worker, and one that was widened."""
        self.epoch = FIRST_EPOCH
        self._niceness = niceness_of_prefills(around.settings, around.engine)
        self._engine = around.engine
        self._membership = around.membership
        self._prefill = prefill
        self._paired = paired
        self._decode = decode
        self._is_leaving = is_leaving
        self._tasks = tasks
        self._lock = asyncio.Lock()

    async def begin(self) -> None:
        """Enter the first role. Raises ControlUnavailableError or LeaseLostError."""
        self._assume()
        await self._register()

    async def change(self, role: WorkerRole, was: WorkerRole | None = None) -> None:
        """Open the doors of ``role``, register under a new epoch, close the others; return when the work behind those
        has ended. A prefill or decode worker that is to do both goes on with its half.

        ``was``: only if that is its role, once changes before this one have ended: a planner must not undo what was
        done by hand meanwhile.

        Raises ConfigError for a role that this worker cannot have, or if its role is not ``was``;
        ControlUnavailableError or LeaseLostError if discovery does not take it: then the worker keeps its role, and is
        listed again once that is possible; WorkerUnavailableError if it is leaving.
        """
        require_possible_role(role, self._engine.facts)
        async with self._lock:
            if was not in (None, self.role):
                raise ConfigError(
                    f"this worker is {self.role}, not {was}: its role was changed meanwhile", param="role"
                )
            if role is self.role:
                return
            if self._is_leaving():
                raise WorkerUnavailableError("the worker is leaving")
            before = self.role, self.pulls_prefills
            self.epoch += 1
            self.role = role
            # A worker that began with both halves prefills for itself; one that was widened has a queue to serve.
            self.pulls_prefills = role is not WorkerRole.DECODE and self._engine.facts.hands_over_kv
            self._open()
            try:
                await self._register()
            except (ControlUnavailableError, LeaseLostError):
                self.role, self.pulls_prefills = before
                self._assume()
                self._tasks.spawn(self._register_again())
                raise
            await self._close_others()
            if self._is_leaving():
                raise WorkerUnavailableError("the worker is leaving")
            self._set_exclusive()

    async def drain(self) -> None:
        """Leave discovery; return when all work in flight has ended."""
        async with self._lock:
            try:
                await self._membership.unlist()
            except ControlUnavailableError as exc:
                _log.warning("cannot leave discovery, trying again: %s", exc)
                self._tasks.spawn(self._unlist_again())
            await self._finish()

    async def publish(self) -> None:
        """Put the entry in discovery again, since something else in it has changed, unless the worker leaves. Waits for
        a change of role. Raises ControlUnavailableError or LeaseLostError."""
        async with self._lock:
            if not self._is_leaving():
                await self._register()

    async def _register(self) -> None:
        await self._membership.register(self.role, self.epoch, pulls_prefills=self.pulls_prefills)

    def _assume(self) -> None:
        """Work in the role, before or without its registration."""
        self._open()
        if not self.role.takes_requests:
            self._decode.accepting = False
        if not self.pulls_prefills:
            self._paired.accepting = False
            self._prefill.stop()
        self._set_exclusive()

    def _open(self) -> None:
        """The doors of the role. Prefills share steps with answers until it is certain that there are none."""
        if self.role.takes_requests:
            self._engine.post(lambda core: self._be_exclusive(core, False))
            self._decode.accepting = True
        if self.pulls_prefills:
            self._paired.accepting = True
            self._prefill.start()

    async def _close_others(self) -> None:
        """The doors that the role lacks; return when the work behind them has ended."""
        if not self.role.takes_requests:
            await self._decode.drain()
        if not self.pulls_prefills:
            self._paired.accepting = False
            await self._prefill.drain()

    def _set_exclusive(self) -> None:
        is_exclusive = self.role is WorkerRole.PREFILL
        self._engine.post(lambda core: self._be_exclusive(core, is_exclusive))

    def _be_exclusive(self, core: Engine, is_exclusive: bool) -> None:
        """On the engine's thread: whether it has nothing but prefills."""
        if core.schedules is not None:
            core.schedules.set_exclusive_prefill(is_exclusive)
        if self._niceness:
            set_niceness(self._niceness if is_exclusive else 0)

    async def _finish(self) -> None:
        """Begin no new work; return when all work in flight has ended. Sessions whose tools run come back to other
        workers, which may read what is here for a while."""
        lends_until_s = time.monotonic() + LEAVING_LENDS_S
        self._paired.accepting = False
        await self._prefill.drain()
        await self._decode.answer_all()
        sessions = self._engine.stats().sessions
        if sessions is not None and sessions.num_paused and sessions.counts.num_named:
            await none_left(self._decode.num_serving, lends_until_s - time.monotonic())
        self._decode.handoffs.lends_prefixes = False
        await self._decode.drain()

    async def _unlist_again(self) -> None:
        """Until then frontends send requests that are refused."""
        while True:
            await asyncio.sleep(RETRY_INTERVAL_S)
            with suppress(ControlUnavailableError):
                return await self._membership.unlist()

    async def _register_again(self) -> None:
        """After a failed change of role: retry until it succeeds or the role changes again."""
        epoch, role = self.epoch, self.role
        while True:
            async with self._lock:
                if self._is_leaving() or (self.epoch, self.role) != (epoch, role):
                    return
                try:
                    return await self._register()
                except (ControlUnavailableError, LeaseLostError) as exc:
                    _log.debug("cannot register: %s", exc)
            await asyncio.sleep(RETRY_INTERVAL_S)
