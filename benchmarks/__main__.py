"""``python -m benchmarks NAME``: finds the script, and turns every failure into one line, as ``kvrelay`` does."""

from __future__ import annotations

import sys

import click

from kvrelay.cli.main import LazyGroup, run

NAME = "python -m benchmarks"
SCRIPTS = {
    "all": ("suite:all_benchmarks", "All of these and of kvrelay bench, with results in one folder."),
    "burst": ("burst:burst", "Chats while many long prompts arrive at once."),
    "warm-burst": ("warm_burst:warm_burst", "Streams at once whose prefix one of two workers holds."),
    "full-burst": ("full_burst:full_burst", "Many prompts at once for a decode worker without room."),
    "goodput": ("goodput:goodput", "The share of requests within their objectives, by policy and rate."),
    "routing": ("routing:routing", "Routing policies on a running cluster."),
    "frontend": ("frontend:frontend", "What the frontend alone can carry."),
    "foreign": ("foreign:foreign", "The same and engines that compute, as wrk and vllm bench serve see them."),
    "router": ("router:router", "The router's parts, a peer's index, and policies over traces."),
    "hand-off": ("hand_off:hand_off", "What hand-offs cost first tokens and decode steps."),
    "layouts": ("layouts:layouts", "What unlike layouts cost a transport: strided beside staged."),
    "ranks": ("ranks:ranks", "KV that each rank moves beside KV that one process moves for all."),
    "engine-turns": ("engine_turns:engine_turns", "What grammars cost an engine, and ranks beside threads."),
    "p2p": ("p2p:p2p", "Transport p2p beside nixl, shm and raw gloo."),
    "p2p-peers": ("p2p_peers:p2p_peers", "What each peer of transport p2p costs."),
    "marks": ("marks:marks", "What the marks of requests' phases cost."),
    "planner": ("planner:planner", "The planner beside static clusters, in virtual time."),
    "relief": ("relief:relief", "From a planner's decision to relief: a worker widened beside one that drains."),
    "simulator": ("simulator:simulator", "The simulator beside the clusters that it simulates: its errors."),
    "orders": ("orders:orders", "The orders beside auto, on prompts that share prefixes."),
    "agents": ("agents:agents", "Agents' sessions: KV retained by value beside by recency."),
    "tiers": ("tiers:tiers", "KV tiers on and off: prompts that return, and those that do not."),
    "hot-prefix": ("hot_prefix:hot_prefix", "Requests at once whose prefix one of four workers has."),
    "warm-restart": ("warm_restart:warm_restart", "The hit rate of a worker's first seconds after its restart."),
    "turns": ("turns:turns", "CPU time per request of two servers, in turn: what a change or a flag costs."),
    "dp-group": ("dp_group:dp_group", "A data-parallel group under load: answers, silences, idle CPU time."),
    "dp-faults": ("dp_faults:dp_faults", "How soon a group has ended after a fault."),
    "dp-wake": ("dp_wake:dp_wake", "How fast an idle group wakes."),
}


@click.group(
    cls=LazyGroup,
    entries={name: (f"benchmarks.{place}", text) for name, (place, text) in SCRIPTS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
def benchmarks() -> None:
    """The benchmarks behind the figures of docs/performance.md."""


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:], benchmarks, NAME))
