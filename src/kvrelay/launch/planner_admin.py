"""An operator's side of the planner: its reports, what steers it, and its log planned again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec

from kvrelay.config import ControlConfig
from kvrelay.control.base import Keys
from kvrelay.errors import IntegrityError, InvalidInputError
from kvrelay.launch.request_plane import connected
from kvrelay.planner.log import read_log, replay
from kvrelay.planner.report import COUNT, HELD, PAUSED, beside, read_reports

NUM_CHANGES = 5
"""The latest of each planner are shown."""
LOAD = (
    "{requests_per_s:.3g} requests/s, each {uncached_tokens:.0f} tokens to prefill and {answer_tokens:.0f} to answer; "
    "prefill {prefill_utilisation:.0%} used, decode {decode_utilisation:.0%}"
)
"""What a plan is made of, for people: figures of ``Numbers``."""


async def planner_reports(config: ControlConfig) -> list[dict[str, Any]]:
    """Of all planners in discovery, the one that decides first. Raises ControlUnavailableError."""
    async with connected(config) as control:
        entries = await control.discovery.list(Keys(config.namespace).planners)
    reports: list[dict[str, Any]] = msgspec.to_builtins(read_reports(entries))
    return reports


def reports_text(reports: list[dict[str, Any]]) -> str:
    """For people."""
    if not reports:
        return "no planner runs in this namespace; start one with kvrelay planner"
    return "\n".join(line for report in reports for line in _lines(report))


def _lines(report: dict[str, Any]) -> list[str]:
    mode = "paused" if report["is_paused"] else report["mode"]
    state = f"{mode}, {report['num_changes']} changes" if report["is_leader"] else "stands by"
    age_s = max(time.time() - report["unix_s"], 0.0)
    where = f"{report['host']}:{report['pid']}"
    lines = [f"planner {report['planner_id']} at {where}: {state}, fleet {report['shape'] or '-'}"]
    if report["problem"]:
        lines.append(f"  {report['problem']}")
    for action in report["actions"]:
        target = " ".join(str(action[name]) for name in ("worker_id", "role") if name in action)
        lines.append(f"  {action['type']} {target}".rstrip() + f": {action['reason']} ({age_s:.0f} s ago)")
        if (numbers := action["numbers"])["requests_per_s"]:
            lines.append("  " + LOAD.format_map(numbers))
        lines += [f"  {line}" for line in beside(numbers, report["measured"])]
    lines += [
        f"  {time.strftime('%H:%M:%S', time.localtime(change['unix_s']))} {change['what']}: {change['reason']}"
        for change in report["changes"][-NUM_CHANGES:]
    ]
    if report["doubt"]:
        lines.append(f"  the estimates are wrong: {report['doubt']}")
    if report["held"]:
        lines.append(f"  held by hand: {', '.join(report['held'])}; give back with kvrelay plan release")
    return lines


async def pause(config: ControlConfig) -> str:
    """What was done. Raises ControlUnavailableError, as all here."""
    await _put(config, PAUSED)
    return f"planners of namespace {config.namespace} only suggest now"


async def resume(config: ControlConfig) -> str:
    """The reverse of ``pause``."""
    await _delete(config, PAUSED)
    return f"planners of namespace {config.namespace} that were started with --mode act change the cluster again"


async def hold(config: ControlConfig, what: str) -> str:
    """``what``: a worker's id, or ``count``. Raises InvalidInputError for a worker that is not there."""
    async with connected(config) as control:
        keys = Keys(config.namespace)
        if what != COUNT and await control.discovery.get(keys.worker(what)) is None:
            raise InvalidInputError(f"no worker {what} in namespace {config.namespace}; give its id, or {COUNT}")
    await _put(config, HELD + what)
    return f"the planner leaves {what} alone until kvrelay plan release {what}"


async def release(config: ControlConfig, what: str) -> str:
    """The reverse of ``hold``, and of a role that was set by hand."""
    await _delete(config, HELD + what)
    return f"{what} is the planner's"


async def _put(config: ControlConfig, name: str) -> None:
    async with connected(config) as control:
        await control.discovery.put(Keys(config.namespace).config_value(name), json.dumps(True).encode())


async def _delete(config: ControlConfig, name: str) -> None:
    async with connected(config) as control:
        await control.discovery.delete(Keys(config.namespace).config_value(name))


def replay_log(path: Path) -> str:
    """Raises InvalidInputError for a file that is no log, IntegrityError for a plan that comes out differently."""
    count = 0
    for count, decision in enumerate(read_log(path), 1):
        again = replay(decision)
        if again != decision.actions:
            raise IntegrityError(
                f"{path}, decision {count}: it was {decision.actions[0]}, and is {again[0]} with this release"
            )
    return f"{count} decisions, each planned again with the same result"
