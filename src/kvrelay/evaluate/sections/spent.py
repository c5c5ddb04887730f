"""How the budget of time was spent: what was planned, what it took, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Section, Table
from kvrelay.evaluate.options import Sizes
from kvrelay.evaluate.plan import Plan


def section_of(basis: Basis, plans: Mapping[str, Plan], sizes: Sizes, taken_s: Mapping[str, float]) -> Section:
    """What was planned, what it took, and what was left out, by name. ``plans``: those with which sections began."""
    left_out = {name: points for name, plan in plans.items() if (points := plan.left_out_of(name))}
    rows = [
        (
            name,
            f"{plans[name].seconds_of(name):.0f}" if name in plans else "",
            f"{taken_s[name]:.0f}" if name in taken_s else "",
            " to ".join(dict.fromkeys(map(str, (min(nums), max(nums)))))
            if name in plans and (nums := plans[name].requests_of(name).values())
            else "",
            f"{len(left_out[name])}" if name in left_out else "",
        )
        for name in dict.fromkeys((*taken_s, *plans))
    ]
    said = "Nothing was left out."
    if left_out:
        each = ", ".join(f"{name} ({'; '.join(points)})" for name, points in left_out.items())
        said = f"Not shown, since there was no time: {each}. --resume takes it, with as much time again."
    short = f" Requests were sent {basis.shortened} times as short as the load's." if basis.shortened > 1 else ""
    held = ""
    if any(plan.is_held for plan in plans.values()):
        held = " Each server did its rounds in one start, so they hide a drift of the machine."
    return Section(
        "What was measured, and how long it took",
        f"{said}{short}{held}",
        f"All must end within {sizes.budget_s / 60:.3g} minutes. Points have as many requests as that allows, "
        f"in each of {sizes.rounds} rounds; a server's start takes {basis.pace.start_s:.0f} s here, and a "
        f"request alone {basis.pace.alone_s:.2g} s. Times in seconds; of a run that went on from another one, its own.",
        (Table(("section", "planned", "taken", "requests of a point", "points left out"), tuple(rows)),),
    )
