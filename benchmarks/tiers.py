"""KV tiers on and off, in turn: prompts that return, private documents, and where evicted blocks go.

    returning   a working set of 1.3 pools: prompts that share long prefixes, asked again and again
    private     documents that no one asks about twice: what do tiers cost those who cannot use them?

``policies`` needs no server: a pool and a host store half as large, over a Zipf load of prompts. With
``boundary`` evicted blocks go to the host store and those that are loaded leave it; with ``inclusive`` each block goes
there when it is computed.
"""

from __future__ import annotations

import asyncio
import mmap
import statistics
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial

import click
import numpy as np

from benchmarks.loads import all_running, fixed_load, in_turns, measure_load, print_rows
from kvrelay.bench.client.connection import Target
from kvrelay.bench.compare import serve_case
from kvrelay.bench.report.metrics import LoadReport, figure
from kvrelay.bench.report.table import Row
from kvrelay.cli.options import json_option, model_argument
from kvrelay.core.layout import paged_kv
from kvrelay.tiers.block import BlockName, shape_of
from kvrelay.tiers.host import HostStore, slot_bytes

POOL_BLOCKS, BLOCK_SIZE = 640, 16
PREFIX_TOKENS, NUM_REQUESTS = 1024, 52
NUM_PREFIXES = round(1.3 * POOL_BLOCKS * BLOCK_SIZE / PREFIX_TOKENS)
LOADS = ("returning", "private")
_COLUMNS = {
    "load": "load",
    "P50 off, ms": "off_median_ms:.0f",
    "P50 on": "on_median_ms:.0f",
    "P90 off": "off_p90_ms:.0f",
    "P90 on": "on_p90_ms:.0f",
    "P90 on/off": "p90_ratio:.2f",
    "P95 on/off": "p95_ratio:.2f",
    "from": "p95_low:.2f",
    "to": "p95_high:.2f",
}


@click.command()
@model_argument
@click.option("--rounds", default=5, type=click.IntRange(2, 1000), help="Turns of each server and load.")
@click.option("--disk", is_flag=True, help="A disk tier too, in a temporary directory.")
@json_option
def tiers(model: str | None, rounds: int, disk: bool, as_json: bool) -> None:
    """End-to-end times with KV tiers and without, and the hit rates of two policies of eviction.

    Example: python -m benchmarks tiers --rounds 10
    """
    rows = asyncio.run(_measure(model, rounds, with_disk=disk))
    hits = policies()
    after = "hit rate, host store of half the pool: " + ", ".join(f"{name} {rate:.3f}" for name, rate in hits.items())
    print_rows(rows, _COLUMNS, as_json, after=after, hit_rates=hits)


async def _measure(model: str | None, num_rounds: int, *, with_disk: bool) -> list[Row]:
    common = f"--prefill 0 --num-blocks {POOL_BLOCKS} --num-threads 1"
    on = "--host-kv-cache 512MiB --host-kv-linger-s 0"
    with tempfile.TemporaryDirectory() as folder:
        if with_disk:
            on += f" --disk-kv-cache {folder}/kv,4GiB"
        async with all_running([serve_case("off", model, common, ""), serve_case("on", model, common, on)]) as targets:
            rows = []
            for load in LOADS:
                rows.append(_row(load, await in_turns(targets, num_rounds, partial(_turn, load))))
            return rows


async def _turn(load: str, target: Target, number: int) -> LoadReport:
    """The prefixes return in each turn; private documents never do."""
    if load == "returning":
        per_group = NUM_REQUESTS // NUM_PREFIXES
        prefix = (NUM_PREFIXES, per_group, PREFIX_TOKENS)
        spec = fixed_load(load, 16, 8, prefix=prefix, max_concurrency=2, num_requests=NUM_PREFIXES * per_group)
        return await measure_load(target, spec, seed=1, warm_up=0)
    spec = fixed_load(load, PREFIX_TOKENS, 8, max_concurrency=2, num_requests=NUM_REQUESTS)
    return await measure_load(target, spec, seed=1000 + number, warm_up=0)


def _row(load: str, found: Sequence[Sequence[LoadReport]]) -> Row:
    def values(which: int, name: str) -> list[float]:
        return [1e3 * (figure(report, f"e2e_s.{name}") or 0.0) for report in found[which]]

    row: Row = {"load": load}
    for which, side in enumerate(("off", "on")):
        row |= {f"{side}_{name}_ms": statistics.median(values(which, name)) for name in ("median", "p90", "p95")}
    ratios = sorted(on / off for off, on in zip(values(0, "p95"), values(1, "p95"), strict=True))
    row |= {
        "p90_ratio": statistics.median(on / off for off, on in zip(values(0, "p90"), values(1, "p90"), strict=True)),
        "p95_ratio": statistics.median(ratios),
        "p95_low": ratios[0],
        "p95_high": ratios[-1],
    }
    return row


# -- where evicted blocks go ------------------------------------------------------------------------------------------

LAYOUT = paged_kv(1, 1, 16, 2, "float32")
SHAPE = shape_of("policies", LAYOUT)


def policies(num_prompts: int = 4000, seed: int = 5) -> dict[str, float]:
    """By policy: the share of blocks that were found, in the pool or the host store."""
    return {
        name: _hit_rate(_zipf(num_prompts, seed), is_boundary=name == "boundary") for name in ("boundary", "inclusive")
    }


def _zipf(num_prompts: int, seed: int) -> Iterator[list[int]]:
    """Prompts of 16 blocks, of 120 prefixes with Zipf's popularity; block hashes."""
    rng = np.random.default_rng(seed)
    weights = 1.0 / np.arange(1, 121) ** 0.9
    for which in rng.choice(120, num_prompts, p=weights / weights.sum()):
        yield [int(which) << 32 | index | 0x9E37 << 48 for index in range(16)]


def _hit_rate(prompts: Iterator[list[int]], *, is_boundary: bool, num_device: int = 480) -> float:
    store = HostStore(_Memory(64 + (num_device // 2) * (slot_bytes(SHAPE) + 16)), SHAPE)
    payload, into = memoryview(bytes(SHAPE.block_bytes)), memoryview(bytearray(SHAPE.block_bytes))
    device: OrderedDict[int, None] = OrderedDict()
    num_found = num_asked = 0
    for prompt in prompts:
        is_leading = True
        for block in prompt:
            num_asked += 1
            name = BlockName(_spread(block), None, bytes(64))
            if block in device:
                num_found += is_leading
            elif is_leading and store.load(name, into):
                num_found += 1
                if not is_boundary:
                    store.worth_again(name.sequence_hash, 1.0)
            else:
                is_leading = False
                if not is_boundary:
                    store.store(name, payload, 1.0)
            device[block] = None
            device.move_to_end(block)
        while len(device) > num_device:
            evicted, _ = device.popitem(last=False)
            if is_boundary:
                store.store(BlockName(_spread(evicted), None, bytes(64)), payload, 1.0)
    store.close()
    return num_found / num_asked


def _spread(block: int) -> int:
    """A hash that looks like one."""
    return block * 0x9E3779B97F4A7C15 % 2**64 | 1


class _Memory:
    def __init__(self, num_bytes: int) -> None:
        self.memory = mmap.mmap(-1, num_bytes)

    def close(self) -> None: ...
