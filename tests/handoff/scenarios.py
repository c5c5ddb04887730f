"""What the explorer explores: which faults, in which order and direction, with how many workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.handoff.mutants import scenario
from tests.handoff.nodes import Scenario

from kvrelay.core.handoff import HandoffOrder, KvDirection

NETWORK = ("lose", "duplicate", "late", "break")
LOCAL = ("cancel", "fail", "no blocks")
PREFILL = ("crash prefill", "stop prefill", "revoke prefill", "cut prefill")
DECODE = ("crash decode", "stop decode", "revoke decode", "cut decode")
ROLES = ("narrow", "widen")
EVERYTHING = (*NETWORK, *LOCAL, *PREFILL, *DECODE, "redeliver", "stray")
PULL, PREFILL_FIRST = KvDirection.PULL, HandoffOrder.PREFILL_FIRST

TWO_READERS: dict[str, Any] = {"num_prefill": 2, "num_requests": 2, "num_hit_blocks": 1, "is_prefix": True}

SCENARIOS = {
    "push, two claimants": scenario(*NETWORK, *LOCAL, "redeliver", num_prefill=2),
    "push, a claimant that cannot reach the decode worker": scenario("stray", "late", "crash decode", num_prefill=2),
    "push, the only prefill worker cannot reach the decode worker": scenario(
        "stray", "cancel", "late", num_faults=3, num_hit_blocks=1, checksums=True
    ),
    "push, paired, the claimant cannot reach the decode worker": scenario(
        "stray", *LOCAL, num_faults=2, order=PREFILL_FIRST, is_paired=True
    ),
    "push, a claimant dies": scenario("crash prefill", num_prefill=2),
    "push, leases, with hits and checksums": scenario(*PREFILL, "damage", num_hit_blocks=1, checksums=True),
    "push, the decode worker fails": scenario("crash decode", "cut decode", "revoke decode"),
    "push, HandoffDone is lost, and the connection": scenario("lose", "break", num_faults=2, num_prefill=1),
    "push, a claimant that falls silent": scenario("lose", "late", "cancel", progress=True, num_prefill=1),
    "push, two chunks": scenario(*LOCAL, "break", "damage", num_chunks=2, checksums=True),
    "push, blocks that cannot be replaced": scenario(*NETWORK, *LOCAL, "crash prefill", can_replace_blocks=False),
    "push, prefill-first": scenario(*NETWORK, *LOCAL, "crash prefill", order=PREFILL_FIRST),
    "push, paired": scenario(*NETWORK, *LOCAL, "crash prefill", "gone", order=PREFILL_FIRST, is_paired=True),
    "push, paired, with hits and checksums": scenario(
        *PREFILL, "damage", "gone", "cancel", num_hit_blocks=1, checksums=True, order=PREFILL_FIRST, is_paired=True
    ),
    "push, paired, a late claimant": scenario(
        *NETWORK, *LOCAL, "gone", order=PREFILL_FIRST, is_paired=True, recalls=True, num_hit_blocks=1, slow=True
    ),
    "push, paired, a late claimant, leases": scenario(
        *PREFILL, "late", order=PREFILL_FIRST, is_paired=True, recalls=True, num_chunks=2, slow=True
    ),
    "pull, paired, a late claimant": scenario(
        *NETWORK, *LOCAL, direction=PULL, order=PREFILL_FIRST, is_paired=True, recalls=True, keeps=True, slow=True
    ),
    "push, copies that a stopped process continues": scenario(*PREFILL, num_hit_blocks=1, copies=True),
    "push, a decode worker that discovery never listed": scenario(
        "crash decode", "stop decode", "cancel", knows_decode=False
    ),
    "pull": scenario(*NETWORK, *LOCAL, "damage", num_hit_blocks=1, checksums=True, direction=PULL),
    "push, kept beside the pool": scenario(
        *NETWORK, *LOCAL, "no room", num_hit_blocks=1, order=PREFILL_FIRST, is_paired=True, keeps=True
    ),
    "push, kept beside the pool, with checksums": scenario(
        *PREFILL, "damage", "cancel", checksums=True, order=PREFILL_FIRST, is_paired=True, keeps=True
    ),
    "pull, kept beside the pool": scenario(
        *NETWORK, *LOCAL, "no room", "damage", num_hit_blocks=1, checksums=True, direction=PULL, keeps=True
    ),
    "pull, kept beside the pool when there is room again": scenario("no room", direction=PULL, keeps=True),
    "pull, kept beside the pool, leases": scenario(
        *PREFILL, "cut decode", "revoke decode", "cancel", direction=PULL, keeps=True
    ),
    "pull, leases": scenario(*PREFILL, "cut decode", "revoke decode", direction=PULL),
    "pull, without room at first": scenario(*NETWORK, *LOCAL, direction=PULL, with_blocks=False),
    "pull, by the engines": scenario(
        *NETWORK, *LOCAL, "crash prefill", direction=PULL, with_blocks=False, by_engine=True
    ),
    "pull, prefill-first": scenario(*NETWORK, *LOCAL, direction=PULL, order=PREFILL_FIRST),
    "prefix": scenario(*NETWORK, "fail", "stray", num_faults=2, num_hit_blocks=1, is_prefix=True),
    "prefix, leases": scenario(*PREFILL, *DECODE, num_hit_blocks=1, is_prefix=True),
    "prefix, with checksums, copies that a stopped process continues": scenario(
        *PREFILL, "damage", "break", num_hit_blocks=1, is_prefix=True, checksums=True, copies=True
    ),
    "prefix, two readers": scenario(num_faults=0, **TWO_READERS),
}
# Engines take in late what nobody waits for, and a connection takes time.
SCENARIOS |= {
    "push, behind, blocks and cancels": scenario(*LOCAL, "redeliver", lags=True),
    "push, behind, paired": scenario("cancel", "gone", "break", lags=True, order=PREFILL_FIRST, is_paired=True),
    "push, behind, a grammar is compiled": scenario("redeliver", lags=True, with_grammar=True),
    "push, a prefix is claimed under a request's number": scenario("forge", "cancel", num_faults=2, num_hit_blocks=1),
    "pull, behind": scenario(*LOCAL, "revoke decode", lags=True, direction=PULL, keeps=True),
    "prefix, behind": scenario("break", "fail", "revoke prefill", lags=True, num_hit_blocks=1, is_prefix=True),
}
KINDS: dict[str, dict[str, Any]] = {
    "push": {},
    "push, prefill-first": {"order": PREFILL_FIRST},
    "push, paired": {"order": PREFILL_FIRST, "is_paired": True},
    "pull": {"direction": PULL},
    "pull, prefill-first": {"direction": PULL, "order": PREFILL_FIRST},
}
# Two faults of the other kinds are among their three.
for kind in ("push", "pull"):
    SCENARIOS[f"{kind}, two faults of network and engine"] = scenario(*NETWORK, *LOCAL, num_faults=2, **KINDS[kind])
THREE_FAULTS = {
    f"{kind}, three faults of network and engine": scenario(*NETWORK, *LOCAL, num_faults=3, **settings)
    for kind, settings in KINDS.items()
}
# Large for their lag, or for their readers, not for their faults.
THREE_FAULTS |= {
    "prefix, two readers, a fault": scenario(*NETWORK, "crash prefill", **TWO_READERS),
    "push, behind, leases": scenario("revoke prefill", lags=True),
    "pull, behind, by the engines": scenario(
        *LOCAL, "revoke decode", lags=True, direction=PULL, with_blocks=False, by_engine=True
    ),
}
THREE_FAULTS["push, a claimant that cannot reach the decode worker, three faults"] = scenario(
    "stray", "late", "crash decode", num_faults=3, num_prefill=2
)
# A worker's role changes between any two steps: it closes a door, and opens it again.
for kind, settings in KINDS.items():
    SCENARIOS[f"{kind}, roles change"] = scenario(*ROLES, num_faults=2, **settings)
    THREE_FAULTS[f"{kind}, roles change beside a fault"] = scenario(*ROLES, *NETWORK, *LOCAL, num_faults=2, **settings)
THREE_FAULTS["push, two prefill workers, roles change"] = scenario(*ROLES, "redeliver", num_faults=2, num_prefill=2)
LARGE = (
    "push, paired, with hits and checksums",
    "push, paired, a late claimant, leases",
    "push, kept beside the pool, with checksums",
    "pull, kept beside the pool, leases",
    "pull, leases",
    "pull, behind",
    "prefix, leases",
)
"""What takes longest of those above. The suite explores it without the faults that smaller scenarios have as well."""
ELSEWHERE = {"fail", "no blocks", "stop prefill", "revoke prefill", "cut prefill", "stop decode", "cut decode"}
for title in LARGE:
    whole = THREE_FAULTS[title] = SCENARIOS.pop(title)
    SCENARIOS[f"{title}, fewer faults"] = replace(whole, faults=whole.faults - ELSEWHERE)
for title in ("push, two claimants", "push, a claimant dies"):
    THREE_FAULTS[title] = SCENARIOS.pop(title)
SCENARIOS["push, two claimants, fewer faults"] = scenario("late", "cancel", "redeliver", "crash prefill", num_prefill=2)
LONG = {
    "push, behind, two claimants": scenario("redeliver", lags=True, num_prefill=2),
    "prefix, two faults": scenario(*NETWORK, *PREFILL, *DECODE, "fail", num_faults=2, num_hit_blocks=1, is_prefix=True),
    "push, two faults": scenario(*EVERYTHING, num_faults=2),
    "push, roles change beside leases": scenario(*ROLES, *PREFILL, *DECODE, num_faults=2),
    "push, two faults, hits and checksums": scenario(
        *NETWORK, *LOCAL, *PREFILL, "damage", num_faults=2, num_hit_blocks=1, checksums=True
    ),
    "push, two claimants, two faults": scenario(*NETWORK, *LOCAL, "redeliver", num_faults=2, num_prefill=2),
    "push, two claimants, leases": scenario(*PREFILL, "redeliver", num_prefill=2),
    "push, two claimants, the decode worker": scenario(*DECODE, num_prefill=2),
    "push, prefill-first, two faults": scenario(*EVERYTHING, num_faults=2, order=PREFILL_FIRST),
    "push, paired, two faults": scenario(*EVERYTHING, "gone", num_faults=2, order=PREFILL_FIRST, is_paired=True),
    "push, copies that a stopped process continues, two faults": scenario(
        *PREFILL, "cancel", "break", num_faults=2, copies=True
    ),
    "pull, two faults": scenario(*EVERYTHING, num_faults=2, direction=PULL),
    "pull, two claimants": scenario(*EVERYTHING, num_prefill=2, direction=PULL),
    "pull, kept beside the pool, two faults": scenario(
        *EVERYTHING, "no room", num_faults=2, direction=PULL, keeps=True
    ),
    "pull, by the engines, two faults": scenario(
        *EVERYTHING, num_faults=2, direction=PULL, with_blocks=False, by_engine=True
    ),
    "pull, prefill-first, two faults": scenario(*EVERYTHING, num_faults=2, direction=PULL, order=PREFILL_FIRST),
}

MANY = Scenario(
    num_prefill=3,
    num_requests=4,
    num_hit_blocks=1,
    num_chunks=2,
    max_computing=2,
    checksums=True,
    slow=True,
    faults=frozenset({*EVERYTHING, *ROLES, "damage"}),
    max_faults=12,
)
