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
    "push, two entries at once": scenario("redeliver", max_computing=2),
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
"""What takes longest of those above. The suite explores it without the faults that others have as well."""
ELSEWHERE = {"fail", "no blocks", "stop prefill", "revoke prefill", "cut prefill", "stop decode", "cut decode"}
LEFT_OUT = dict.fromkeys(LARGE, ELSEWHERE) | {
    "push, leases, with hits and checksums": {"stop prefill"},
    "push, copies that a stopped process continues": {"revoke prefill"},
    "push, the only prefill worker cannot reach the decode worker": {"late"},
    "pull, kept beside the pool, leases": {*ELSEWHERE, "revoke decode"},
}
for title, faults in LEFT_OUT.items():
    whole = THREE_FAULTS[title] = SCENARIOS.pop(title)
    SCENARIOS[f"{title}, fewer faults"] = replace(whole, faults=whole.faults - faults)
for title in ("push, two claimants", "push, a claimant dies"):
    THREE_FAULTS[title] = SCENARIOS.pop(title)
SCENARIOS["push, two chunks, one is not written"] = scenario("cancel", "fail", num_chunks=2)
SCENARIOS["push, two claimants, fewer faults"] = scenario("late", "cancel", "crash prefill", num_prefill=2)
FINDERS: dict[str, tuple[str, ...]] = {
    "prefix": (
        "a prefix is free as soon as its reader's connection ends",
        "prefill-first: a claim that its own release has overtaken is granted",
        "a prefix that was read is told to the wrong one",
    ),
    "prefix, behind": ("a reader whose lease was lost goes on",),
    "push, two claimants, fewer faults": (
        "any generation is the current one",
        "a second claimant gets the first one's blocks",
        "a loan that arrives after its hand-off has closed is forgotten",
        "a request goes on with the first claimant's blocks",
        "a loan that the engine has no blocks for is not answered",
    ),
    "push, two faults of network and engine": (
        "blocks are free when their request ends",
        "a release is said once",
        "a hand-off has stopped though transfers are in flight",
        "blocks are free when the computation stops",
    ),
    "push, leases, with hits and checksums, fewer faults": (
        "a peer is fenced when its lease ends",
        "a write is posted past the fence",
        "what was damaged on its way is taken",
        "damage is not told",
    ),
    "push, copies that a stopped process continues, fewer faults": (
        "a claim in a term that nobody knows yet is granted",
        "a lost lease stops nothing",
        "the end of a lease counts in the middle of a copy",
    ),
    "push, HandoffDone is lost, and the connection": (
        "a lost HandoffDone is not said again",
        "blocks are free once their last write is submitted",
        "KV of another kind is taken",
        "written before the grant",
        "the engine gets blocks back whose window is open",
        "a grant is sent before its window is open",
        "the transfer thread does not hear of the end of grants",
        "a job is kept for ever",
    ),
    "push, the only prefill worker cannot reach the decode worker, fewer faults": (
        "blocks are not lent while they are verified",
    ),
    "push, paired, with hits and checksums, fewer faults": ("prefill-first: hits that D shares are written",),
    "push, a decode worker that discovery never listed": (
        "a decode worker that discovery never listed is told for ever",
    ),
    "push, two chunks": ("HandoffDone overtakes a write",),
    "push, two chunks, one is not written": ("HandoffDone follows a write that has failed",),
    "pull, roles change": ("pull: blocks are free once D knows of them",),
    "pull, kept beside the pool when there is room again": ("pull: D is told of blocks that the engine still empties",),
    "pull, kept beside the pool, leases, fewer faults": (
        "pull: blocks are free while the engine still moves their KV",
    ),
    "push, kept beside the pool, with checksums, fewer faults": (
        "prefill-first: what the engine still moves is written",
    ),
    "pull, two faults of network and engine": ("pull: D abandons what it still reads", "a read that has failed counts"),
    "push, a prefix is claimed under a request's number": ("a prefix is lent under a request's number",),
    "pull, without room at first": ("a window without blocks is opened, and nothing closes it",),
    "push, paired, the claimant cannot reach the decode worker": ("a request that was cancelled is expected for ever",),
    "pull, behind, fewer faults": ("pull: a read begins that was decided before the lease was lost",),
    "push, paired, a late claimant": (
        "a late claimant's blocks go back before it has answered",
        "a claimant gives back what it goes on to compute",
    ),
    "push, two entries at once": ("an entry is taken twice",),
    "push, behind, a grammar is compiled": (
        "an entry is taken that was delivered again while its grammar was compiled",
    ),
    "push, behind, blocks and cancels": ("a chunk of a prefill that is over is told",),
}
"""What the suite explores, each for the mutants that it finds out; the rest of the scenarios are the matrix's."""
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
