"""``kvrelay bench``: the bench room's commands, and those of the rooms that it may not import."""

from __future__ import annotations

from kvrelay.bench.commands import bench_group
from kvrelay.cli.bench_chaos import bench_chaos
from kvrelay.cli.bench_engine import bench_engine
from kvrelay.cli.bench_frontend import bench_frontend
from kvrelay.cli.bench_router import bench_router
from kvrelay.cli.bench_routing import bench_routing
from kvrelay.cli.bench_transfer import bench_transfer

bench = bench_group
for command in (bench_chaos, bench_engine, bench_frontend, bench_router, bench_routing, bench_transfer):
    bench.add_command(command)
