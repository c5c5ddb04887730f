"""How often workers of a large cluster make communicators when their number is bounded. Pure: a simulation of contacts.

Each hand-off is one contact of a prefill and a decode worker. With the prefill queue any free prefill worker pulls the
entry, so the pair is as good as drawn; ``stickiness`` is the share of hand-offs for which prefix overlap leads to the
pair of an earlier one. A contact without a communicator makes one, and each side that is at its bound evicts the one
that it has not used for longest, as ``transfer/p2p/pairs.py`` does with idle ones.
"""

from __future__ import annotations

import random
from collections import OrderedDict

import msgspec

from kvrelay.bench.report.table import table


class ContactsRow(msgspec.Struct, frozen=True):
    """``made_per_handoff``: communicators made per hand-off once the bound was reached. ``most``: at one worker."""

    max_connections: int
    stickiness: float
    made_per_handoff: float
    most_prefill: int
    most_decode: int


def simulate_contacts(
    num_prefill: int,
    num_decode: int,
    max_connections: int,
    *,
    num_handoffs: int = 200_000,
    stickiness: float = 0.0,
    seed: int = 0,
) -> ContactsRow:
    """The first half of the hand-offs warms up."""
    draw = random.Random(seed)
    used: list[OrderedDict[tuple[int, int], None]] = [OrderedDict() for _ in range(num_prefill + num_decode)]
    recent: list[tuple[int, int]] = []
    num_made = most_prefill = most_decode = 0
    for number in range(num_handoffs):
        if recent and draw.random() < stickiness:
            pair = recent[draw.randrange(len(recent))]
        else:
            pair = (draw.randrange(num_prefill), num_prefill + draw.randrange(num_decode))
            recent = [*recent[-255:], pair]
        if pair not in used[pair[0]]:
            num_made += number >= num_handoffs // 2
            for side in pair:
                if len(used[side]) >= max_connections:
                    gone, _ = used[side].popitem(last=False)
                    for other in gone:
                        used[other].pop(gone, None)
        for side in pair:
            used[side][pair] = None
            used[side].move_to_end(pair)
        most_prefill = max(most_prefill, len(used[pair[0]]))
        most_decode = max(most_decode, len(used[pair[1]]))
    made = num_made / (num_handoffs - num_handoffs // 2)
    return ContactsRow(max_connections, stickiness, made, most_prefill, most_decode)


def contacts_text(rows: list[ContactsRow], num_prefill: int, num_decode: int) -> str:
    """The figures as a table."""
    cells = (
        (
            str(row.max_connections),
            f"{row.stickiness:.0%}",
            f"{row.made_per_handoff:.3f}",
            str(row.most_prefill),
            str(row.most_decode),
        )
        for row in rows
    )
    header = ("bound", "sticky", "made per hand-off", "most at a P", "most at a D")
    return f"{num_prefill}P{num_decode}D\n\n{table(header, cells)}"
