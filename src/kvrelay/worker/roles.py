"""A worker's role: which work it begins, how it changes, and how work in flight ends before that.

The role is state. A change drains the worker, registers it under a new epoch and continues; weights and KV pool stay.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kvrelay.config import WorkerRole
from kvrelay.core.tasks import TaskSet
from kvrelay.engine.contract import Engine, EngineFacts
from kvrelay.errors import ConfigError, ControlUnavailableError, LeaseLostError, WorkerUnavailableError
from kvrelay.worker.cluster.membership import RETRY_INTERVAL_S
from kvrelay.worker.decode.serving import DecodeSide
from kvrelay.worker.prefill.paired import PairedPrefills
from kvrelay.worker.prefill.pulling import PrefillSide
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
            f"this worker cannot be a {role} worker: its engine hands no KV over (it computes elsewhere, or its ranks "
            "hold their KV on several CUDA devices); use --role both",
            param="role",
        )


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
        self.epoch = FIRST_EPOCH
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
        await self._enter(self.role)

    async def change(self, role: WorkerRole) -> None:
        """Drain, register again under a new epoch, continue. The weights and the KV pool stay.

        Raises ConfigError for a role that this worker cannot have; ControlUnavailableError if discovery is away: then
        the worker keeps its role, and is listed again once that is possible; WorkerUnavailableError if it is leaving.
        """
        require_possible_role(role, self._engine.facts)
        async with self._lock:
            if role is self.role:
                return
            before = self.role
            try:
                await self._membership.unlist()
                await self._finish()
                if self._is_leaving():
                    raise WorkerUnavailableError("the worker is leaving")
                self.epoch += 1
                await self._enter(role)
            except ControlUnavailableError:
                self._assume(before)
                self._tasks.spawn(self._register_again())
                raise

    async def drain(self) -> None:
        """Leave discovery; return when all work in flight has ended."""
        async with self._lock:
            try:
                await self._membership.unlist()
            except ControlUnavailableError as exc:
                _log.warning("cannot leave discovery: %s", exc)
            await self._finish()

    async def _enter(self, role: WorkerRole) -> None:
        self._assume(role)
        await self._membership.register(role, self.epoch)

    def _assume(self, role: WorkerRole) -> None:
        """Work in ``role``, before or without its registration."""
        self.role = role
        self._engine.post(lambda core: _set_exclusive_prefill(core, role is WorkerRole.PREFILL))
        self._decode.accepting = role.takes_requests
        self._paired.accepting = role.pulls_prefills
        if role.pulls_prefills:
            self._prefill.start()
        else:
            self._prefill.stop()

    async def _finish(self) -> None:
        """Begin no new work; return when all work in flight has ended."""
        self._paired.accepting = False
        await self._prefill.drain()
        await self._decode.drain()

    async def _register_again(self) -> None:
        """After a failed change of role: retry until it succeeds or the role changes again."""
        epoch, role = self.epoch, self.role
        while True:
            async with self._lock:
                if self._is_leaving() or (self.epoch, self.role) != (epoch, role):
                    return
                try:
                    return await self._membership.register(role, epoch)
                except (ControlUnavailableError, LeaseLostError) as exc:
                    _log.debug("cannot register: %s", exc)
            await asyncio.sleep(RETRY_INTERVAL_S)


def _set_exclusive_prefill(core: Engine, exclusive: bool) -> None:
    if core.schedules is not None:
        core.schedules.set_exclusive_prefill(exclusive)
