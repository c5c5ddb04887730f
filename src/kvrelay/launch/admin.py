"""An operator's commands to a running cluster: status and load, drain, lease, change of role, run-time settings.

Commands return what the command line prints, but for the settings, which print what they have changed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from kvrelay.config import ControlConfig, DisaggConfig, WorkerRole
from kvrelay.config.addresses import is_loopback, reached_url
from kvrelay.config.loading import nearest
from kvrelay.control.base import ControlPlane, Keys
from kvrelay.core.control_codec import decode_setting
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import (
    ConfigError,
    ControlUnavailableError,
    InvalidInputError,
    KvrelayError,
    ProtocolError,
    WorkerUnavailableError,
)
from kvrelay.launch.frontend_calls import plain_table, wide_console
from kvrelay.launch.request_plane import connected
from kvrelay.launch.worker_calls import WorkerCalls, worker_calls
from kvrelay.placement import threshold as disagg
from kvrelay.router import runtime as router_settings

STATUS_TIMEOUT_S = 3.0
RETRY_S = 0.1
NOT_SET = "what each process was started with"
DISAGG_PREFIX = "disagg."
ROUTER_PREFIX = "router."
SETTABLE = (
    *(DISAGG_PREFIX + name for name in disagg.SETTABLE),
    *(ROUTER_PREFIX + name for name in router_settings.SETTABLE),
)


async def find_frontend(config: ControlConfig) -> str:
    """The URL of a frontend in discovery that this machine reaches, of one on this machine if there is one. Raises
    ConfigError if none is known, ControlUnavailableError."""
    from kvrelay.frontend.cluster.frontends import other_frontends  # a slow import, and serve imports this module

    async with connected(config) as control:
        known = (await other_frontends(control, Keys(config.namespace), "")).values()
    found = []
    for info in known:
        is_here = info.host == socket.gethostname()
        with suppress(ValueError):  # of a URL that is none
            if info.url and (is_here or not is_loopback(urlsplit(info.url).hostname or "")):
                found.append((not is_here, reached_url(info.url, "127.0.0.1" if is_here else info.host)))
    if not found:
        raise ConfigError(
            f"none of the {len(known)} frontends of namespace {config.namespace} has an address in discovery that this "
            "machine reaches: give --url, e.g. --url http://10.0.0.4:8000",
            param="url",
        )
    return min(found)[1]


async def cluster_status(config: ControlConfig, *, check: bool = False) -> dict[str, Any]:
    """Every worker's own status, and the queue; with ``check`` also the integrity of its block pool."""
    async with connected(config) as control, worker_calls(control, config) as calls:
        answers = await asyncio.gather(*(status_of(info, calls, check) for info in await calls.look()))
        return {"prefill_queue_size": await _queue_size(control, config.connect_timeout_s), "workers": answers}


async def _queue_size(control: ControlPlane, within_s: float) -> int:
    """Asked again for ``within_s`` seconds, should the control server pause."""
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            return await control.prefill_queue.size()
        except ControlUnavailableError:
            if not control.is_connected or time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(RETRY_S)


async def status_of(info: WorkerInfo, calls: WorkerCalls, check: bool) -> dict[str, Any]:
    """With an ``error`` in place of the numbers of a worker that does not answer."""
    try:
        status: dict[str, Any] = await calls.ask(info.worker_id, "status", timeout_s=STATUS_TIMEOUT_S)
        if status.get("worker_id") != info.worker_id:
            raise WorkerUnavailableError(f"{status.get('worker_id')} answers at its address")
        status["block_size"] = info.block_size
        if check:
            status["integrity"] = await calls.ask(info.worker_id, "check_integrity", timeout_s=STATUS_TIMEOUT_S)
        return status
    except KvrelayError as exc:
        return {"worker_id": info.worker_id, "role": info.role, "model": info.model, "error": str(exc)}


def require_idle(report: dict[str, Any]) -> None:
    """Raise KvrelayError unless every worker answered, its pool is intact, and no block is in use."""
    for status in report["workers"]:
        if "error" in status:
            raise KvrelayError(f"{status['worker_id']}: {status['error']}")
        if status["integrity"]["blocks_in_use"]:
            raise KvrelayError(f"{status['worker_id']} has {status['integrity']['blocks_in_use']} blocks in use")


def status_table(report: dict[str, Any]) -> None:
    """Print the report as a table. Ids are not shortened, since people copy them into other commands."""
    print(f"prefill queue: {report['prefill_queue_size']}")
    if not report["workers"]:
        print("no worker is registered")
        return
    names = ("worker", "role", "model", "requests", "waiting", "KV used", "KV demand")
    table = plain_table(*names, "hand-offs in/out", "remote prefills")
    for status in report["workers"]:
        if "error" in status:
            table.add_row(status["worker_id"], status["role"], status["model"], f"[red]{status['error']}[/red]")
            continue
        load = status["load"]
        table.add_row(
            status["worker_id"],
            status["role"],
            status["model"],
            f"{load['request_active_slots']}/{load['request_total_slots']}",
            str(load["num_requests_waiting"]),
            f"{load['kv_active_blocks']}/{load['kv_total_blocks']}",
            f"{load['kv_demand_perc']:.0%}",
            f"{status['handoffs_in']}/{status['handoffs_out']}",
            str(status["decode"]["num_remote_done"] + status["prefill"]["num_prefills"]),
        )
    wide_console().print(table)
    for status in report["workers"]:
        if (holding := status.get("kv_holding")) and holding["num_blocks_in_use"]:
            print(
                f"{status['worker_id']} KV holding area: {holding['num_blocks_in_use']}/{holding['num_blocks']} blocks "
                f"in use, {holding['num_arriving']} prefills to come"
            )
        if status.get("kv_tiers"):
            print(f"{status['worker_id']} KV tiers: {tiers_line(status['kv_tiers'])}")
        if status.get("prefixes") and any(status["prefixes"]["counts"].values()):
            print(f"{status['worker_id']} prefixes of other workers: {tiers_line(status['prefixes'])}")
        if reason := status.get("prefill_queue_error"):
            ago = f"{status['prefill_queue_error_age_s']:.0f} s ago"
            print(f"{status['worker_id']} could not queue its latest prefill, {ago}, and computed it itself: {reason}")


def tiers_line(tiers: dict[str, Any]) -> str:
    """What KV beyond the pool has brought, and what each store holds back. A message of a worker, as it came."""
    counts = tiers["counts"]
    stores = (
        f"{medium}: {store['num_loaded']} blocks loaded, {store['num_stored']} stored, "
        f"{sum(store['misses'].values())} missed, {sum(store['drops'].values())} dropped"
        for medium, store in tiers["stores"].items()
    )
    saved_s = round(counts["saved_s"], 1) + 0.0  # never -0.0
    return (
        f"{counts['num_hits']} prompts loaded, {counts['num_not_worth']} not worth it, "
        f"{counts['num_failed_loads']} failed, {saved_s} s saved; {'; '.join(stores)}"
    )


async def drain(config: ControlConfig, worker_id: str) -> Any:
    """Let the worker finish its requests and leave; its answer. Raises WorkerUnavailableError, KvrelayError."""
    async with connected(config) as control, worker_calls(control, config) as calls:
        await calls.look()
        return await calls.ask(worker_id, "drain")


async def revoke_lease(config: ControlConfig, worker_id: str) -> str:
    """End the lease of the worker with that id, and say what follows. The worker is not asked: it may hang, and its
    entry may be malformed. Raises WorkerUnavailableError."""
    keys = Keys(config.namespace)
    async with connected(config) as control:
        if not await control.discovery.revoke_lease_of(keys.worker(worker_id)):
            known = [key.removeprefix(keys.workers) for key in await control.discovery.list(keys.workers)]
            raise WorkerUnavailableError(f"no worker {worker_id} in discovery{nearest(worker_id, known)}")
    return f"revoked the lease of {worker_id}: it gets no more requests, finishes what it has, and exits"


async def change_role(config: ControlConfig, worker_id: str, role: WorkerRole, *, force: bool) -> Any:
    """Let the worker continue as ``role``; its answer. Raises WorkerUnavailableError, KvrelayError, and, unless with
    ``force``, InvalidInputError if no worker of its model would take requests any more."""
    async with connected(config) as control, worker_calls(control, config) as calls:
        workers = await calls.look()
        models = {info.model for info in workers if info.worker_id == worker_id}
        others = [info for info in workers if info.model in models and info.worker_id != worker_id]
        is_last = bool(models) and not any(info.role.takes_requests for info in others)
        if is_last and not role.takes_requests and not force:
            raise InvalidInputError(
                f"{worker_id} is the last worker that takes requests: as a {role} worker it would leave none. Give "
                "another worker the role decode or both first, or --force"
            )
        return await calls.ask(worker_id, "role", role.value)


async def clear_caches(config: ControlConfig, *, skips_gone: bool = False) -> list[str]:
    """Each worker forgets its prefixes, and what host memory and disks have of its model; the ids of those that have.
    Raises WorkerUnavailableError; with ``skips_gone`` a worker that does not answer has nothing to forget."""
    gone = (WorkerUnavailableError,) if skips_gone else ()
    cleared: list[str] = []
    async with connected(config) as control, worker_calls(control, config) as calls:
        for info in await calls.look():
            with suppress(*gone):
                await calls.ask(info.worker_id, "clear_cache")
                cleared.append(info.worker_id)
    return cleared


async def config_set(config: ControlConfig, key: str, value: str) -> None:
    """Put a run-time setting into discovery, where workers and frontends watch it, and print what was changed.

    Raises ConfigError.
    """
    shown = json.dumps(checked(key, value))
    async with connected(config) as control:
        place = Keys(config.namespace).config_value(key)
        before = await control.discovery.get(place)
        await control.discovery.put(place, shown.encode())
        print(f"{key} is {shown} in namespace {config.namespace} (before: {_shown_before(key, before)})")
        if key.startswith(DISAGG_PREFIX):
            await _warn_if_unused(control, config, key.removeprefix(DISAGG_PREFIX))
        else:
            await _warn_if_other_router(control, config, key)


async def _warn_if_unused(control: ControlPlane, config: ControlConfig, name: str) -> None:
    """Ask the workers that take requests whether the setting decides anything there; say if it does not."""
    async with worker_calls(control, config) as calls:
        workers = [info for info in await calls.look() if info.role.takes_requests]
        answers = await asyncio.gather(*(status_of(info, calls, check=False) for info in workers))
    settings = {status["worker_id"]: status.get("disagg", {}) for status in answers}
    idle = [worker_id for worker_id, known in settings.items() if name in known.get("unused", ())]
    if idle:
        policy = settings[idle[0]]["disagg_policy"]
        where = f"{len(idle)} of {len(workers)} workers that take requests"
        print(
            f"note: {DISAGG_PREFIX}{name} has no effect on {where} ({idle[0]}: --disagg-policy {policy}); "
            f"{disagg.TO_THRESHOLDS}. Prefill-first, it decides until costs are known.",
            file=sys.stderr,
        )


async def _warn_if_other_router(control: ControlPlane, config: ControlConfig, key: str) -> None:
    """Frontends are not in discovery, so only a policy that was set at run time is known here."""
    policy = ROUTER_PREFIX + "router"
    value = await control.discovery.get(Keys(config.namespace).config_value(policy))
    if key == policy or value is None:
        return
    shown = _shown_setting(policy, value)
    if shown not in map(json.dumps, router_settings.USE_WEIGHTS):
        counts = f"only under {' or '.join(router_settings.USE_WEIGHTS)}"
        print(f"note: {key} has no effect while {policy} is {shown}, {counts}", file=sys.stderr)


def checked(key: str, value: str) -> object:
    """The text as the setting's own type. Raises ConfigError."""
    require_settable(key)
    if key.startswith(ROUTER_PREFIX):
        name = key.removeprefix(ROUTER_PREFIX)
        settings = router_settings.RuntimeSettings()
        settings.put(name, value)
        return settings.get(name)
    name = key.removeprefix(DISAGG_PREFIX)
    policy = disagg.DisaggPolicy(DisaggConfig())
    policy.set(name, value)
    return getattr(policy.config, name)


def require_settable(key: str) -> None:
    """Raises ConfigError."""
    if key not in SETTABLE:
        hint = nearest(key, SETTABLE) or f"; the run-time settings are {', '.join(SETTABLE)}"
        raise ConfigError(f"{key} is no run-time setting{hint}", param=key)


async def config_unset(config: ControlConfig, key: str) -> None:
    """Unset a run-time setting: every process returns to the value of its start. Print what was changed.

    Raises ConfigError.
    """
    require_settable(key)
    async with connected(config) as control:
        place = Keys(config.namespace).config_value(key)
        before = await control.discovery.get(place)
        await control.discovery.delete(place)
    print(f"{key} is {NOT_SET} in namespace {config.namespace} (before: {_shown_before(key, before)})")


async def config_get(config: ControlConfig, key: str | None) -> None:
    """Print the settings made at run time, one ``key value`` per line; without any, which there are. Raises
    ConfigError."""
    if key is not None:
        require_settable(key)
    async with connected(config) as control:
        keys = Keys(config.namespace)
        entries = await control.discovery.list(keys.config)
    settings = {name.removeprefix(keys.config): value for name, value in sorted(entries.items())}
    found = {name: value for name, value in settings.items() if key in (None, name)}
    for name, value in found.items():
        print(name, _shown_setting(name, value))
    if not found:
        # Not on standard output, where a script reads settings.
        known = "" if key is not None else f"; the run-time settings are {', '.join(SETTABLE)}"
        print(f"{key or 'every setting'} is {NOT_SET} in namespace {config.namespace}{known}", file=sys.stderr)


def _shown_before(name: str, value: bytes | None) -> str:
    return NOT_SET if value is None else _shown_setting(name, value)


def _shown_setting(name: str, value: bytes) -> str:
    try:
        return json.dumps(decode_setting(name, value))
    except ProtocolError as exc:
        return f"(refused by every process: {exc})"
