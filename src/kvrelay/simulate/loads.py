"""Loads of the simulator: a trace's requests, or generated ones, as arrivals.

Traces are read by ``bench.traces``, which the bench room shares. A generator is a pure function of its spec and seed:

    kind:option=value,...        agents:sessions=50,rate=2        shift:rate=4,num=2000
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from kvrelay.bench.formats import TraceRecord, first_line, not_empty
from kvrelay.bench.load.request import random_arrivals
from kvrelay.bench.traces import UnknownTraceError, read_trace
from kvrelay.config.loading import nearest
from kvrelay.engine.request import PrefillMode
from kvrelay.errors import InvalidInputError
from kvrelay.simulate.arrival import Arrival, RecordedArrival
from kvrelay.simulate.logs import read_log
from kvrelay.simulate.playback import play_back

_log = logging.getLogger(__name__)

MAX_GAP_S = 3600.0
MAX_REQUESTS = 100_000
"""The simulator keeps a result for each request, so a longer trace needs a limit from the caller."""
MAX_TOKENS = 10_000_000
"""A longer prompt or answer is a wrong column."""
BLOCK = 16
LOGS = (
    "--access-log json of a frontend, or CSV or JSON lines with fields for the time (timestamp, ISO 8601 or seconds), "
    "the prompt (prompt_tokens) and the answer (output_tokens)"
)
TOOL_S, TOOL_SIGMA, MAX_TOOLS = (0.1, 30.0), 0.6, 16


def trace_arrivals(path: Path, *, limit: int | None = None, time_scale: float = 1.0) -> list[Arrival]:
    """The first ``limit`` requests, ``time_scale`` times as fast. Reads no further. None: all, of a trace of at most
    MAX_REQUESTS. Raises InvalidInputError.

    Sessions are open loops: a request that continues a chat is sent at its published time, even if the simulated
    answer before it is late. ``agents:`` generates closed loops.
    """
    if not 1e-3 <= time_scale <= 1e6:
        raise InvalidInputError(f"--time-scale must be 0.001 to 1,000,000, got {time_scale:g}", param="time_scale")
    if is_recording(path):
        recorded = recorded_arrivals(path)[:limit]
        return [msgspec.structs.replace(one, time_s=one.time_s / time_scale) for one in recorded]
    unanswered: list[int] = []
    arrivals = _arrivals(path, _records(path), time_scale, unanswered)
    found = list(itertools.islice(arrivals, MAX_REQUESTS if limit is None else limit))
    if unanswered:
        if not found:
            raise InvalidInputError(f"{path}: no request has an answer; give a log of answered requests")
        _log.warning(
            "%s: left out requests without an answer (refused, failed or 0 tokens): %d, the first is number %d",
            path,
            len(unanswered),
            unanswered[0],
        )
    if limit is None and next(arrivals, None) is not None:
        raise InvalidInputError(
            f"{path} has more than {MAX_REQUESTS:,} requests, and each is kept in memory; choose with --limit N",
            param="limit",
        )
    return found


def _records(path: Path) -> Iterator[TraceRecord]:
    """Of a published format, or of a log."""
    try:
        return read_trace(path)
    except UnknownTraceError as exc:
        records = read_log(path)
        if records is None:
            raise InvalidInputError(f"{exc.message}, or a log: {LOGS}") from exc
        return not_empty(path, records)


def is_recording(path: Path) -> bool:
    """Whether the file is of ``kvrelay worker --record-steps``. Raises InvalidInputError if it cannot be read."""
    return first_line(path).startswith(b'{"type":"header"')


def recorded_arrivals(path: Path) -> list[RecordedArrival]:
    """The requests of a recording, with the very tokens of their prompts. How long an answer was comes out when the
    recording is played back. Raises InvalidInputError."""
    playback = play_back(path)
    if playback.difference:
        raise InvalidInputError(
            f"{path}: this release schedules other batches than the recorded ones; record anew ({playback.difference})"
        )
    if any(request.mode is PrefillMode.HANDOFF for _, request in playback.arrivals):
        raise InvalidInputError(f"{path} is of a prefill worker, which sees no whole answer; record the decode workers")
    if not playback.arrivals:
        raise InvalidInputError(f"{path} is empty: no request in it")
    return playback.load()


def _arrivals(
    path: Path, records: Iterator[TraceRecord], time_scale: float, unanswered: list[int]
) -> Iterator[Arrival]:
    """``unanswered`` takes the numbers of the requests that are left out: nothing says how long their answers would
    have been."""
    start_s = last_s = None
    sessions: dict[str, str] = {}
    for number, record in enumerate(records, 1):
        _check(path, number, record, record.timestamp_s if last_s is None else last_s)
        last_s = record.timestamp_s
        if not record.output_len:
            unanswered.append(number)
            continue
        start_s = record.timestamp_s if start_s is None else start_s
        session = record.chat
        if record.chat is not None and record.parent is not None:
            session = sessions.get(record.parent, record.parent)
        if record.chat is not None and session is not None:
            sessions[record.chat] = session
        yield Arrival(
            time_s=(record.timestamp_s - start_s) / time_scale,
            prompt_tokens=record.input_len,
            answer_tokens=record.output_len,
            hash_ids=record.hash_ids or None,
            hash_tokens=record.hash_tokens,
            session=session,
        )


def _check(path: Path, number: int, record: TraceRecord, last_s: float) -> None:
    """Equal times are fine: requests that come together."""
    where = f"{path}: request {number}"
    if not 0.0 <= record.timestamp_s < math.inf:
        raise InvalidInputError(f"{where} has the time {record.timestamp_s:g} s; remove it, or shift all times")
    if record.timestamp_s < last_s:
        raise InvalidInputError(f"{where} is {last_s - record.timestamp_s:g} s before the one above; sort by time")
    if record.timestamp_s - last_s > MAX_GAP_S:
        raise InvalidInputError(
            f"{where} comes {record.timestamp_s - last_s:g} s after the one above; cut the trace at gaps above an hour"
        )
    if not 1 <= record.input_len <= MAX_TOKENS or not 0 <= record.output_len <= MAX_TOKENS:
        raise InvalidInputError(
            f"{where} has a prompt or an answer of an impossible length; remove it (possible are 1 to {MAX_TOKENS:,} "
            "tokens; requests with an answer of 0 are left out)"
        )
    # A prompt longer than its ids has an end of its own; the reverse is a wrong block size.
    if (len(record.hash_ids) - 1) * record.hash_tokens >= record.input_len:
        raise InvalidInputError(
            f"{where} has {len(record.hash_ids)} hash ids of {record.hash_tokens} tokens for {record.input_len} tokens"
        )


# -- generators -------------------------------------------------------------------------------------------------------

_OPTIONS: dict[str, dict[str, float]] = {
    "poisson": {"rate": 1, "num": 500, "prompt": 1000, "answer": 200},
    "bursts": {"rate": 1, "num": 500, "prompt": 1000, "answer": 200, "burstiness": 0.1},
    "diurnal": {"rate": 1, "num": 500, "prompt": 1000, "answer": 200, "period": 300, "swing": 0.8},
    "shift": {"rate": 1, "num": 500, "prompt": 4000, "answer": 400, "period": 300, "swing": 0.8},
    "agents": {
        "rate": 1,
        "sessions": 50,
        "calls": 8,
        "prompt": 4000,
        "answer": 200,
        "cached": 0.86,
        "pause": 1,
        "tools": 0,
        "prefetch": 0,
    },
}
_TOPS = {"swing": 1, "cached": 1, "prompt": MAX_TOKENS, "answer": MAX_TOKENS} | dict.fromkeys(
    ("num", "sessions", "calls"), MAX_REQUESTS
)
_TOPS["tools"] = MAX_TOOLS
_COUNTS = ("num", "prompt", "answer", "sessions", "calls", "tools")
_MAY_BE_ZERO = ("pause", "swing", "cached", "tools", "prefetch")


def parse_load(spec: str) -> tuple[str, dict[str, float]]:
    """The kind, and all its options with the given values. Raises InvalidInputError, which says what is possible."""
    kind, _, rest = spec.partition(":")
    if kind not in _OPTIONS:
        raise InvalidInputError(f"--load {kind!r} is none of {', '.join(_OPTIONS)}", param="load")
    options, given = dict(_OPTIONS[kind]), set[str]()
    for part in rest.split(",") if rest else ():
        name, _, text = part.partition("=")
        if name not in options:
            hint = nearest(name, options) or ""
            raise InvalidInputError(f"--load {kind}: no option {name!r}; {hint} it has {', '.join(options)}")
        if name in given:
            raise InvalidInputError(f"--load {kind}: {name} stands twice; give it once", param="load")
        given.add(name)
        try:
            value = float(text)
        except ValueError as exc:
            raise InvalidInputError(f"--load {kind}: {name} must be a number, got {text!r}", param="load") from exc
        options[name] = value
    for name, value in options.items():
        top = _TOPS.get(name, 1e9)
        low_is_fine = value >= 0.0 if name in _MAY_BE_ZERO else value >= 1 / MAX_GAP_S
        if not low_is_fine or not value <= top or (name in _COUNTS and value != int(value)):
            what = f"{'a whole number ' if name in _COUNTS else ''}above 0 and at most {top:,.0f}"
            raise InvalidInputError(f"--load {kind}: {name} must be {what}, got {value:g}", param="load")
    if kind == "agents" and options["cached"] == 1.0:
        raise InvalidInputError("--load agents: cached must be below 1: each call adds a new token", param="load")
    if kind == "agents" and options["sessions"] * options["calls"] > MAX_REQUESTS:
        raise InvalidInputError(f"--load agents: sessions times calls can be at most {MAX_REQUESTS:,}", param="load")
    return kind, options


def generated_arrivals(spec: str, seed: int = 0) -> list[Arrival]:
    """A function of its arguments. Raises InvalidInputError."""
    kind, options = parse_load(spec)
    rng = np.random.default_rng([seed, sorted(_OPTIONS).index(kind)])
    if kind == "agents":
        return _agents(rng, options)
    if kind in ("poisson", "bursts"):
        times = random_arrivals(rng, options["rate"], options.get("burstiness", 1.0))
    else:
        times = _waves(rng, options["rate"], options["period"], options["swing"] if kind == "diurnal" else 0.0)
    arrivals = []
    for time_s in itertools.islice(times, int(options["num"])):
        # The mix moves between long prompts with short answers and the reverse; the mean work stays.
        wave = options["swing"] * math.sin(2 * math.pi * time_s / options["period"]) if kind == "shift" else 0.0
        arrivals.append(
            Arrival(
                time_s=time_s,
                prompt_tokens=_scattered(rng, options["prompt"] * (1 + wave)),
                answer_tokens=_scattered(rng, options["answer"] * (1 - wave)),
            )
        )
    return arrivals


def _waves(rng: np.random.Generator, rate: float, period_s: float, swing: float) -> Iterator[float]:
    """A Poisson process whose rate is a sine around ``rate``, by thinning (Lewis and Shedler, 1979)."""
    for time_s in random_arrivals(rng, rate * (1 + swing)):
        if rng.random() * (1 + swing) <= 1 + swing * math.sin(2 * math.pi * time_s / period_s):
            yield time_s


def _scattered(rng: np.random.Generator, mean: float) -> int:
    """Lognormal lengths, sigma 0.5, with that mean; at least one token."""
    return max(1, round(float(rng.lognormal(math.log(max(mean, 1.0)) - 0.125, 0.5))))


def _agents(rng: np.random.Generator, options: dict[str, float]) -> list[Arrival]:
    """Sessions that begin as a Poisson process. Each call repeats the conversation and adds to it, so that over all
    calls the share ``cached`` of the prompt tokens has been in the prompt before. The first prompt has
    ``prompt`` tokens; a call is sent ``pause`` seconds (exponential) after the answer before it. With ``tools`` each
    answer but the last calls one of so many instead, as ``tool_pause_s`` says. So many seconds as ``prefetch`` says
    before each later call the client asks for a prefetch.

    With ``calls`` n and growth g per call the shared tokens are the sum of all prompts but the last:
    cached = (sum of the first n - 1) / (sum of all), which is solved for g.
    """
    num_calls, first = int(options["calls"]), options["prompt"]
    growth = _growth(num_calls, first, options["cached"])
    fresh = itertools.count(1)
    starts = random_arrivals(rng, options["rate"])
    found: list[Arrival] = []
    begun: list[list[tuple[float, int, int, tuple[int, ...], int]]] = []
    num_tools = int(options["tools"])
    for _ in range(int(options["sessions"])):
        at, ids, calls, tool = next(starts), list[int](), [], 0
        for call in range(num_calls):
            length = max(BLOCK, round((first + call * growth) / BLOCK) * BLOCK)
            ids += [next(fresh) for _ in range(length // BLOCK - len(ids))]
            pause_s = at
            if call:
                pause_s = tool_pause_s(rng, tool, num_tools) if num_tools else float(rng.exponential(options["pause"]))
            tool = int(rng.integers(num_tools)) if num_tools else 0
            calls.append((pause_s, length, _scattered(rng, options["answer"]), tuple(ids), tool))
        begun.append(calls)
    for number, calls in enumerate(begun):
        for call, (time_s, length, answer, hash_ids, tool) in enumerate(calls):
            after = len(found) - 1 if call else None
            found.append(
                Arrival(
                    time_s=time_s,
                    prompt_tokens=length,
                    answer_tokens=answer,
                    hash_ids=hash_ids,
                    hash_tokens=BLOCK,
                    session=f"s{number}",
                    tool=f"tool-{tool}" if num_tools and call + 1 < num_calls else "",
                    prefetch_s=options["prefetch"] if call else 0.0,
                    after=after,
                )
            )
    return found


def tool_pause_s(rng: np.random.Generator, tool: int, num_tools: int) -> float:
    """How long tool number ``tool`` takes this time: log-normal, within TOOL_S. The medians of the tools divide TOOL_S
    evenly on a logarithmic scale."""
    low, high = TOOL_S
    median = low * (high / low) ** ((tool + 0.5) / num_tools)
    return min(max(float(rng.lognormal(math.log(median), TOOL_SIGMA)), low), high)


def _growth(num_calls: int, first: float, cached: float) -> float:
    """Tokens that each call adds. Prompts are ``first + i * growth``, i below n = ``num_calls``."""
    n = num_calls
    # cached * (n * first + g * n(n-1)/2) = (n-1) * first + g * (n-1)(n-2)/2, solved for g.
    slope = cached * n * (n - 1) / 2 - (n - 1) * (n - 2) / 2
    rest = (n - 1 - cached * n) * first
    growth = rest / slope if slope else math.inf
    if n < 2 or not 0.0 <= growth < math.inf:
        low, high = ((n - 2) / n if n > 1 else 0.0), ((n - 1) / n if n > 1 else 0.0)
        raise InvalidInputError(
            f"--load agents: {n} calls can share {low:.2f} to {high:.2f} of their prompts, not {cached:g}; "
            "change calls or cached",
            param="load",
        )
    return growth


def load_of(
    trace: Path | None, spec: str | None, *, limit: int | None, time_scale: float = 1.0, seed: int = 0
) -> list[Arrival]:
    """What a command's --trace or --load names; exactly one. Raises InvalidInputError."""
    if trace is not None and spec is None:
        return trace_arrivals(trace, limit=limit, time_scale=time_scale)
    if spec is not None and trace is None:
        return generated_arrivals(spec, seed)
    raise InvalidInputError("give a load: either --trace FILE or --load SPEC", param="load")
