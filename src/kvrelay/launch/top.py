"""``kvrelay top``: what the page at ``/ui`` shows, as text in a terminal. It reads the same JSON of a frontend."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from textwrap import wrap
from typing import Any

from kvrelay.config.byte_sizes import shown_bytes
from kvrelay.errors import WorkerUnavailableError
from kvrelay.launch.frontend_calls import cluster_snapshot, listed_requests, understood
from kvrelay.marks.text import printable
from kvrelay.planner.report import beside

INTERVAL_S = 1.0
NUM_SLOWEST = 8
LEAST_SLOWEST = 4
"""Lines of them on a screen that has no room for all."""
MAX_WRONG = 3
MAX_FLOWS = 6
KV_CELLS = 10
WORKER_COLUMNS = "{:<28} {:<8} {:<10} {:>5} {:>5}  {:<16} {:>10} {:>9} {:>9} {:>7} {:>6} {:>9}"
REQUEST_COLUMNS = "{:<52} {:<12} {:<7} {:>11} {:>11} {:>8} {:>7}"
WIDE = 134
"""From so many columns on. Below, the tables are for 80: rates and latencies stay, the rest is left out or shorter."""
NARROW_WORKER_COLUMNS = "{0:<18.18} {1:<7} {2:<9} {3:>4} {4:>5} {5:>4} {6:>9} {7:>8} {8:>8}"
NARROW_REQUEST_COLUMNS = "{0:<42.42} {1:<12} {3:>11} {4:>11}"
# Terminal: other screen without a cursor, and back; home; erase to the end of line, and of screen.
BEGIN, END, HOME, REST_OF_LINE, REST = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"
BOLD, RED, YELLOW, PLAIN = "\x1b[1m", "\x1b[31m", "\x1b[33m", "\x1b[0m"
COLOURS = {"error": RED, "warning": YELLOW}

Report = Mapping[str, Any]


async def watch(url: str, api_key: str | None, *, as_json: bool, once: bool) -> None:
    """Show the cluster of the frontend at ``url``, every second unless ``once``. In a terminal the screen is redrawn,
    and a frontend that is away is asked again; elsewhere reports follow each other.

    Raises WorkerUnavailableError, KvrelayError.
    """
    if once or as_json or not sys.stdout.isatty():
        while True:
            lines = [json.dumps(await _look(url, api_key))] if as_json else await _text(url, api_key, 200, 1000)
            print("\n".join(lines), flush=True)
            if once:
                return
            await asyncio.sleep(INTERVAL_S)
    await _text(url, api_key, WIDE, NUM_SLOWEST)  # a wrong address or key is an error, not a reason to wait
    sys.stdout.write(BEGIN)
    try:
        await _redraw(url, api_key)
    finally:
        sys.stdout.write(END)
        sys.stdout.flush()


async def _redraw(url: str, api_key: str | None) -> None:
    lines: list[str] = []
    while True:
        size = shutil.get_terminal_size()
        try:
            lines = [coloured(line) for line in await _text(url, api_key, size.columns, size.lines - 1)]
            note = ""
        except WorkerUnavailableError as exc:
            note = f"{RED}reconnecting: {printable(str(exc))[: size.columns - 14]}{PLAIN}"
        body = "".join(f"{line}{REST_OF_LINE}\r\n" for line in lines[: size.lines - 1])
        sys.stdout.write(f"{HOME}{body}{note}{REST}")
        sys.stdout.flush()
        await asyncio.sleep(INTERVAL_S)


async def _look(url: str, api_key: str | None) -> dict[str, Any]:
    cluster, slowest = await asyncio.gather(
        cluster_snapshot(url, api_key), listed_requests(url, NUM_SLOWEST, "slowest", api_key)
    )
    return {**cluster, "slowest": slowest}


async def _text(url: str, api_key: str | None, width: int, height: int) -> list[str]:
    report = await _look(url, api_key)
    with understood(url):
        return text_of(report, width, height)


def text_of(report: Report, width: int, height: int) -> list[str]:
    """At most ``height`` lines of at most ``width`` characters. Workers with the most waiting requests come first;
    those for which there is no room are counted. Control characters in ids and errors are escaped."""
    head = [*_head(report), *_wrong(report, width), *_wrapped(_sums(report), width), *_planner(report, width), ""]
    is_wide = width >= WIDE
    foot = [*_flows(report, is_wide), *_slowest(report, is_wide)]
    if len(head) + len(report["workers"]) + len(foot) + 3 > height:
        foot = list(_slowest(report, is_wide))[:LEAST_SLOWEST]
    room = max(height - len(head) - len(foot) - 3, 3)
    lines = [*head, *_workers(report, room, is_wide), *foot]
    return [printable(line)[:width].rstrip() for line in lines[:height]]


def coloured(line: str) -> str:
    """For a terminal: headings bold, what is wrong in its colour."""
    severity, _, _ = line.partition(":")
    if severity in COLOURS:
        return f"{COLOURS[severity]}{line}{PLAIN}"
    return f"{BOLD}{line}{PLAIN}" if line[:1].isupper() or line.startswith("kvrelay ") else line


def _head(report: Report) -> Iterator[str]:
    counts = ", ".join(f"{len(report[name])} {name}" for name in ("workers", "frontends"))
    yield f"kvrelay {report['release']}, {_clock(report['now_unix'])}: {counts}"


def _wrong(report: Report, width: int) -> Iterator[str]:
    """The worst one whole: what helps stands at its end."""
    found = report["wrong_now"]
    lines = [f"{wrong['severity']}: {wrong['text']}" for wrong in found[:MAX_WRONG]]
    yield from wrap(lines[0], width, subsequent_indent="  ") if lines else ()
    yield from lines[1:]
    if len(found) > MAX_WRONG:
        yield f"and {len(found) - MAX_WRONG} more"
    if not found:
        yield "nothing is wrong now"


def _sums(report: Report) -> Iterator[str]:
    total = report["total"]
    queue = "?" if total["prefill_queue"] is None else total["prefill_queue"]
    yield f"{_rate(total.get('answered_per_s'))} answers/s"
    yield f"{_rate(total['tokens_per_s'])} tokens/s"
    ended = ", ".join(
        f"{_or_dash(total.get(f'{name}_last_minute'))} {name}" for name in ("answered", "refused", "failed")
    )
    yield f"last minute: {ended}"
    judged, in_time = total.get("judged_last_minute"), total.get("in_time_last_minute")
    yield f"in time {_share(in_time, judged):.0%}\n" if judged else "in time -\n"
    yield f"{total['in_flight']} in flight"
    yield f"{total['running']} running"
    yield f"{total['waiting']} waiting"
    yield f"{queue} in the prefill queue\n"
    yield f"first token {_quantiles(total['ttft_ms'])}"
    yield f"between tokens {_quantiles(total['itl_ms'])}"
    yield f"KV {_share(total['kv_used'], total['kv_total']):.0%} of {total['kv_total']:,} blocks\n"
    drafted, accepted = (
        sum(worker.get(f"{name}_tokens") or 0 for worker in report["workers"]) for name in ("drafted", "accepted")
    )
    if drafted:
        yield f"speculation: {_share(accepted, drafted):.0%} of {drafted:,} drafted tokens accepted\n"
    yield from _prefills(total)


def _prefills(total: Mapping[str, Any]) -> Iterator[str]:
    """Of the last minute; a frontend of an earlier release tells none."""
    places = [f"{place['last_minute']} {place['place']}" for place in total.get("places", ()) if place["last_minute"]]
    if places:
        yield f"prefills: {', '.join(places)}\n"
    cost = total.get("handoffs")
    if cost and cost["arrived"]:
        yield f"hand-offs: {cost['arrived']}, each {_milliseconds(cost['whole_ms'])}"
        yield f"those queued {_milliseconds(cost['queue_ms'])} until claimed"
        yield f"KV {_milliseconds(cost['sending_ms'])} after the prefill\n"
    if num_prompt := total.get("prompt_tokens_last_minute"):
        yield f"prompts: {num_prompt:,} tokens, {_share(total['cached_tokens_last_minute'], num_prompt):.0%} cached"
        loaded = total["loaded_tokens_last_minute"].items()
        yield ", ".join(f"{tokens:,} read from {medium}" for medium, tokens in loaded if tokens) + "\n"
    if num_paused := total.get("sessions_paused"):
        yield f"sessions: {num_paused:,} paused at workers"
        yield f"{total['sessions_last_minute']['returned']:,} returned in 1 min\n"


def _wrapped(parts: Iterable[str], width: int) -> Iterator[str]:
    """Lines of as many parts as there is room for. A part that ends with a line break ends its line."""
    line = ""
    for part in parts:
        if line and len(line) + 2 + len(part) > width:
            yield line
            line = ""
        line += ("  " if line else "") + part.rstrip("\n")
        if part.endswith("\n"):
            yield line
            line = ""
    if line:
        yield line


def _planner(report: Report, width: int) -> Iterator[str]:
    """The one that decides, the latest change of any, and its estimates beside what clients got."""
    planners = report.get("planners", ())
    if planners:
        leader = planners[0]
        line = f"planner: {'paused' if leader['is_paused'] else leader['mode']}, fleet {leader['shape'] or '-'}"
        changes = [change for planner in planners for change in planner.get("changes", ())]
        last = max(changes, key=lambda change: float(change["unix_s"]), default=None)
        yield line if last is None else f"{line}; {_clock(last['unix_s'])} {last['what']}: {last['reason']}"
        for action in leader.get("actions", ()):
            yield from _wrapped(beside(action["numbers"], leader.get("measured")), width)


def _clock(unix_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(unix_s))


def _workers(report: Report, room: int, is_wide: bool) -> Iterator[str]:
    columns = WORKER_COLUMNS if is_wide else NARROW_WORKER_COLUMNS
    workers = sorted(report["workers"], key=lambda worker: (-(worker["waiting"] or 0), worker["role"], worker["id"]))
    names = ("WORKER", "ROLE", "STATE", "RUN", "WAIT", "KV", "PROMPT/S", "TOKENS/S", "QUEUED", "AGE", "CORES", "MEMORY")
    yield columns.format(*names)
    for worker in workers[:room]:
        share = _share(worker["kv_used"] or 0, worker["kv_total"] or 0)
        cells = "#" * round(share * KV_CELLS)
        name = worker["id"]
        if worker.get("dp_group"):  # narrow, without the word that all ids begin with
            name = f"{name if is_wide else name.removeprefix('worker-')} rank {worker['dp_rank']}"
        yield columns.format(
            name,
            worker["role"],
            worker["state"],
            _or_dash(worker["running"]),
            _or_dash(worker["waiting"]),
            f"{cells:.<{KV_CELLS}} {share:.0%}" if is_wide else f"{share:.0%}",
            _rate(worker["prefill_tokens_per_s"]),
            _rate(worker["tokens_per_s"]),
            _or_dash(worker["prefill_s_queued"], "{:.2f} s"),
            _or_dash(worker["age_s"], "{:.1f} s"),
            _or_dash(worker.get("cpu_cores"), "{:.2f}"),
            f"{worker['rss_bytes'] / 2**20:,.0f} MiB" if worker.get("rss_bytes") else "-",
        )
    if len(workers) > room:
        yield f"and {len(workers) - room} more"
    yield ""


def _flows(report: Report, is_wide: bool) -> Iterator[str]:
    size = 28 if is_wide else 18
    flows = report["flows"][:MAX_FLOWS]
    if flows:
        yield "KV BETWEEN WORKERS"
        for flow in flows:
            amount = f"{shown_bytes(flow['bytes'])} in {flow['transfers']:,}, {flow['mean_ms']:.2f} ms each"
            yield f"{flow['source'][:size]:<{size}} > {flow['target'][:size]:<{size}} {amount}"
        yield ""


def _slowest(report: Report, is_wide: bool) -> Iterator[str]:
    columns = REQUEST_COLUMNS if is_wide else NARROW_REQUEST_COLUMNS
    if report["slowest"]:
        names = ("SLOWEST REQUESTS", "STATUS", "PLACE", "LATENCY", "FIRST TOKEN", "PROMPT", "ANSWER")
        yield columns.format(*names)
        for request in report["slowest"]:
            yield columns.format(
                request["id"][:52],
                request["status"],
                request["place"] or "-",
                _milliseconds(request["latency_ms"]),
                _milliseconds(request["ttft_ms"]),
                request["prompt_tokens"],
                request["output_tokens"],
            )


def _quantiles(found: Mapping[str, float | None]) -> str:
    return f"p50 {_milliseconds(found['p50'])} p95 {_milliseconds(found['p95'])}"


def _milliseconds(value: float | None) -> str:
    return _or_dash(value, "{:,.1f} ms")


def _rate(value: float | None) -> str:
    return _or_dash(value, "{:,.1f}")


def _or_dash(value: float | None, text: str = "{}") -> str:
    return "-" if value is None else text.format(value)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
