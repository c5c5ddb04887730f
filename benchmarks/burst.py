"""The effect of a burst on chats: many long prompts arrive at once, while chats arrive at a fixed rate.

Each turn starts a cold server, measures idle chats, then sends the burst. Within a round every case gets the same
requests.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import click

from benchmarks.loads import fixed_load, send
from benchmarks.options import all_cases, experiment_options
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import FAILED, Reduce, finish, summarise, take_turns
from kvrelay.bench.load.mix import ClassSpec
from kvrelay.bench.report.machine import describe_machine
from kvrelay.bench.report.metrics import Distribution, Outcome, RequestRecord, RunResult, distribution
from kvrelay.bench.report.table import Row, results_table
from kvrelay.errors import InvalidInputError

BURST_KIND = "kvrelay-bench-burst/1"
_HOW: dict[str, Reduce] = {"chat_max_s": max, "client_max_s": max, "num_chats": sum}
_COLUMNS = {
    "case": "case",
    "idle p50": "idle_p50_s:.3f",
    "chat p50": "chat_p50_s:.3f",
    "p99": "chat_p99_s:.3f",
    "max": "chat_max_s:.3f",
    "client max": "client_max_s:.3f",
    "chat gap p99": "chat_gap_p99_s:.3f",
    "long p50": "long_p50_s:.3f",
    "last long": "long_max_s:.3f",
    "failed": "num_failed:.0f",
}


@dataclass(frozen=True, slots=True)
class BurstLoad:
    """Lengths in tokens, ``chat_rate`` in requests per second, ``chat_s`` seconds of chats from the burst on."""

    num_prompts: int = 200
    prompt: int = 8000
    output: int = 8
    chat_prompt: int = 30
    chat_output: int = 16
    chat_rate: float = 4.0
    chat_s: float = 24.0

    @property
    def idle(self) -> ClassSpec:
        """Chats without a burst."""
        return self._chats("idle", self.chat_rate * 4, 16)

    @property
    def burst(self) -> tuple[ClassSpec, ...]:
        """The long prompts, all at once, and the chats beside them."""
        long = fixed_load("long", self.prompt, self.output, num_requests=self.num_prompts)
        return long, self._chats("chat", self.chat_rate, max(1, math.ceil(self.chat_rate * self.chat_s)))

    def _chats(self, name: str, rate: float, count: int) -> ClassSpec:
        return fixed_load(name, self.chat_prompt, self.chat_output, rate=rate, num_requests=count)


@click.command()
@experiment_options
@click.option("--num-prompts", default=200, type=click.IntRange(1), help="Long prompts.")
@click.option("--prompt", default=8000, type=click.IntRange(1), help="Tokens of a long prompt.")
@click.option("--chat-rate", default=4.0, type=click.FloatRange(0.01), help="Chats per second.")
@click.option("--chat-s", default=24.0, type=click.FloatRange(0.01), help="Seconds of chats.")
@click.option("--variant", "variants", multiple=True, metavar="NAME=ARGS", help="1P1D with more arguments; repeatable.")
def burst(as_json: bool, rounds: int, **given: Any) -> None:
    """A burst of long prompts while chats arrive: the chats' first tokens, and the last long prompt's.

    Example: python -m benchmarks burst --rounds 1 --variant 'long queue=--max-prefill-queue-size 1000'
    """
    load = BurstLoad(**{name: given[name] for name in ("num_prompts", "prompt", "chat_rate", "chat_s")})

    async def measure(target: Target, row: Row) -> Row:
        seed = 2 * row["round"]
        idle = await send(target, load.idle, seed=seed, warm_up=2)
        loaded = await send(target, *load.burst, seed=seed + 1, warm_up=0)
        return burst_figures(idle.result, loaded.result)

    cases = all_cases(given, "--speedup-ratio 2", arrangements(given["variants"]))
    turns = take_turns(cases, rounds, measure, say=lambda row: f"chats p99 {row['chat_p99_s']:.3f} s")
    results = summarise(turns, _HOW)
    title = (
        f"{load.num_prompts} prompts of {load.prompt} tokens at once, chats of {load.chat_prompt} tokens at "
        f"{load.chat_rate:g}/s; seconds to first tokens, medians of {rounds} rounds, the maxima are the worst of all; "
        "client max: how late this client itself wrote a chat, which no other column has"
    )
    report = {"kind": BURST_KIND, "machine": describe_machine(), "load": asdict(load), "results": results}
    finish({**report, "turns": turns}, f"{title}\n\n{results_table(results, _COLUMNS)}", turns, as_json)


def arrangements(variants: Sequence[str]) -> dict[str, str]:
    """One aggregated worker, one prefill and one decode worker, and the latter with each variant's arguments.

    A variant is ``NAME=ARGUMENTS``; InvalidInputError for any other.
    """
    found = {"aggregated": "--prefill 0 --decode 1", "1P1D": "--prefill 1 --decode 1"}
    for text in variants:
        name, separator, flags = text.partition("=")
        if not (separator and name.strip()) or "/" in name:
            raise InvalidInputError(f"{text!r} is not NAME=ARGUMENTS", param="variant")
        found[name.strip()] = f"{found['1P1D']} {flags}"
    return found


def burst_figures(idle: RunResult, burst: RunResult) -> Row:
    """Seconds to first tokens, and ``chat_gap_p99_s`` between a chat's later tokens.

    ``chat_*`` are of the chats sent before the last long prompt had its first token, from the moment when a chat was
    written to its connection. ``client_max_s`` is the longest time by which this client wrote a chat too late: it sends
    the burst from the same cores.
    """
    long = [record for record in burst.records if record.class_name == "long"]
    ends_ns = max((record.stamps_ns[0] for record in long if record.stamps_ns), default=burst.stop_ns)
    chats = [record for record in burst.records if record.class_name == "chat" and record.sent_ns <= ends_ns]
    chat, longs, alone = _ttft(chats), _ttft(long), _ttft(idle.records)
    gaps = distribution([gap for record in chats for gap in record.gaps_s().tolist()])
    num_failed = sum(record.outcome is not Outcome.OK for record in (*long, *chats, *idle.records))
    if chat is None or longs is None:
        return {"num_failed": num_failed, "error": FAILED if chats else "the burst ended before a chat was sent"}
    return {
        "idle_p50_s": alone.median if alone else None,
        "chat_p50_s": chat.median,
        "chat_p99_s": chat.p99,
        "chat_max_s": chat.max,
        "client_max_s": max(record.client_delay_s for record in chats),
        "chat_gap_p99_s": gaps.p99 if gaps else None,
        "long_p50_s": longs.median,
        "long_max_s": longs.max,
        "num_chats": len(chats),
        "num_failed": num_failed,
    }


def _ttft(records: Sequence[RequestRecord]) -> Distribution | None:
    """A failed request has no first token; it is counted, not averaged."""
    return distribution([ttft for record in records if (ttft := record.written_ttft_s) is not None])
