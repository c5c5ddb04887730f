"""Admin commands of an operator, as they arrive over the request plane. Replies are JSON.

The worker and the engine carry a command out; this module selects it by name and turns an error into a reply.
"""

from __future__ import annotations

import json
from typing import Protocol

from kvrelay.config import WorkerRole
from kvrelay.core.messages import AdminReply, AdminRequest
from kvrelay.engine.contract import Engine, EngineHost
from kvrelay.errors import ConfigError, KvrelayError

ADMIN_COMMANDS = ("status", "drain", "role", "check_integrity", "cache", "clear_cache")


class Administered(Protocol):
    """The part of a worker that admin commands use."""

    @property
    def role(self) -> WorkerRole: ...

    @property
    def epoch(self) -> int: ...

    async def status(self) -> dict[str, object]: ...

    def request_drain(self) -> None: ...

    async def set_role(self, role: WorkerRole) -> None: ...

    def check_integrity(self) -> None: ...


async def run_admin_command(message: AdminRequest, worker: Administered, engine: EngineHost) -> AdminReply:
    """Run the command. The reply to an unknown command, or to one that fails, carries the reason."""
    try:
        payload = await _perform(message, worker, engine)
    except (KvrelayError, ValueError) as exc:
        return AdminReply(message.nonce, error=str(exc))
    return AdminReply(message.nonce, payload=json.dumps(payload))


async def _perform(message: AdminRequest, worker: Administered, engine: EngineHost) -> object:
    match message.command:
        case "status":
            return await worker.status()
        case "drain":
            worker.request_drain()
            return {"draining": True}
        case "role":
            await worker.set_role(WorkerRole(message.argument))
            return {"role": worker.role, "epoch": worker.epoch}
        case "check_integrity":
            worker.check_integrity()
            return await engine.call(_integrity)
        case "cache":
            hashes = await engine.call(lambda core: core.cached_hashes())
            return {"blocks": [f"{block:016x}" for block in hashes]}
        case "clear_cache":
            await engine.call(lambda core: core.clear_cache())
            return {"cleared": True}
    raise ConfigError(f"unknown admin command {message.command}; known are {', '.join(ADMIN_COMMANDS)}")


def _integrity(core: Engine) -> dict[str, object]:
    core.check_integrity()
    metrics = core.metrics()
    return {"ok": True, "blocks_in_use": metrics.kv_active_blocks, "blocks": metrics.kv_total_blocks}
