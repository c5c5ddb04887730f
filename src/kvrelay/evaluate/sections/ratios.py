"""x prefill and y decode workers, measured: four mock engines that take the times measured here, and a change of roles
while they run. The simulator gets the same requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvrelay.config import WorkerRole
from kvrelay.core.step_cost import StepCost
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import GAP_P99, TTFT_P90, Effect, Row, effects, effects_sentence, points_of
from kvrelay.evaluate.findings import Section, Table
from kvrelay.evaluate.load import EvaluatedLoad
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.sections.accuracy import by_load, check_of, has_enough
from kvrelay.evaluate.shown import comparison
from kvrelay.evaluate.workbench import ServerCase, Workbench
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.cluster import ClusterSpec

NAME = "ratios"
TITLE = "x prefill and y decode workers, measured with mock engines"
RATIOS = {"1P3D": (1, 3), "2P2D": (2, 2), "3P1D": (3, 1)}
EVEN = "2P2D"
CHANGED = "2P2D made 1P3D"
SHARE = 1.5
"""Of what 1P1D does: four workers, none of them alone."""
SHORTEST_STEP_S = 0.002
"""Steps of four mock engines that are shorter leave two cores no time to wait."""
SECONDS = 10.0


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    too_fast = basis.costs[1].step.step_s < SHORTEST_STEP_S
    return [] if too_fast else [Wish(NAME, len(RATIOS) + 1, (basis.at(SHARE),), SECONDS)]


def mock_flags(step: StepCost, load: EvaluatedLoad) -> tuple[str, ...]:
    """Of a mock engine that takes as long as ``step`` says at the load's mean context, and for its mean prompt. A step
    with prefills and decodes takes both base times."""
    context = load.mean_prompt + load.mean_answer / 2
    times = {
        "--prefill-base-s": step.prefill_s,
        "--prefill-token-s": step.prefill_token_s + step.pair_s * load.mean_prompt / 2,
        # A mock engine gives one token in each step.
        "--decode-base-s": step.step_s / step.tokens_per_step,
        "--decode-seq-s": (step.decode_s + step.context_s * context) / step.tokens_per_step,
    }
    return ("--engine", "mock", *(word for name, value in times.items() for word in (name, f"{value:.9f}")))


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    step = basis.costs[1].step
    if step.step_s < SHORTEST_STEP_S:
        why = f"Not measured: a step of {step.step_s * 1e3:.2g} ms is too short for four engines on this machine."
        return [Section(TITLE, why, "See the simulated sizes.")]
    times = mock_flags(step, bench.sent)
    size = {name: (*times, "--prefill", str(x), "--decode", str(y)) for name, (x, y) in RATIOS.items()}
    cases = [ServerCase(name, flags) for name, flags in size.items()]
    cases.append(ServerCase(CHANGED, size[EVEN], ((WorkerRole.PREFILL, WorkerRole.DECODE),)))
    rows = bench.rows(NAME, cases, [basis.at(SHARE)])
    checks = bench.journal.take("ratios, simulated", lambda: _checks(bench, basis, rows), (basis.costs[1], rows))
    return [section_of(rows, checks)]


def _checks(bench: Workbench, basis: Basis, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The figures of each turn beside the simulator's for the same requests."""
    found = []
    with bench.bar.part(f"simulation: {NAME}", SECONDS):
        for number, row in enumerate(rows):
            if row["case"] in RATIOS and has_enough(row):
                x, y = RATIOS[row["case"]]
                spec = ClusterSpec(prefill=x, decode=y, max_model_len=bench.load.context)
                found.append(check_of(bench, basis, row, spec, number))
    return found


def section_of(rows: Sequence[Row], checks: Sequence[Row]) -> Section:
    points = points_of(rows)
    others = [name for name in RATIOS if name != EVEN]
    ratios = effects(rows, (TTFT_P90, GAP_P99), EVEN, others, points)
    roles = effects(rows, (TTFT_P90, GAP_P99), others[0], [CHANGED], points)
    return comparison(
        TITLE,
        "Real routers, queues and hand-offs between four workers, whose engines only wait as long as the engine "
        "measured here would compute; their KV is small, so the link costs nothing. The last case starts as 2P2D; then "
        "a prefill worker becomes a decode worker (kvrelay role), and then it is measured. Times in milliseconds.",
        rows,
        [*ratios, *roles],
        told=ratios,
        cases=[*RATIOS, CHANGED],
        more=f" {roles_sentence(roles)}{same_sentence(checks)}",
        tables=simulated_table(checks),
    )


def roles_sentence(roles: Sequence[Effect]) -> str:
    if not roles:
        return "A change of roles was not measured."
    if any(one.is_shown for one in roles):
        return f"Changed while it runs: {effects_sentence(roles)}"
    return "A cluster whose roles were changed while it ran is not shown to differ from one that started so."


def same_sentence(checks: Sequence[Row]) -> str:
    """Whether the simulator finds the same ratio best by its median answer."""
    found = by_load(checks)
    if len(found) < len(RATIOS):
        return ""
    best = [min(found, key=lambda key: found[key][side]["e2e_p50_s"])[1] for side in (0, 1)]
    agrees = "so does the simulator" if best[0] == best[1] else f"the simulator says {best[1]}"
    return f" {best[0]} has the fastest median answers; {agrees}."


def simulated_table(checks: Sequence[Row]) -> tuple[Table, ...]:
    """Times in milliseconds."""
    rows = []
    for (point, case), sides in by_load(checks).items():
        cells = [f"{side[name] * 1e3:.0f}" for name in ("ttft_mean_s", "e2e_p50_s") for side in sides]
        rows.append((point, case, *cells))
    head = ("load", "case", "mean TTFT", "simulated", "median answer", "simulated")
    return (Table(head, tuple(rows)),) if rows else ()
