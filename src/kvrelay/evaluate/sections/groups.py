"""A data-parallel group beside two replicas: what both cost without requests, and under load."""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.effects import (
    GAP_P99,
    TTFT_P90,
    Figure,
    Row,
    effects,
    effects_sentence,
    effects_table,
    good,
    median,
    unmeasured,
)
from kvrelay.evaluate.findings import Section, Table
from kvrelay.evaluate.load import Point
from kvrelay.evaluate.plan import Wish
from kvrelay.evaluate.shown import failures, rows_table
from kvrelay.evaluate.workbench import REPLICAS, ServerCase, Workbench
from kvrelay.executors.checkpoint_facts import read_json_object
from kvrelay.simulate.advise import Advice

NAME = "groups"
TITLE = "A data-parallel group, idle and under load"
GROUP = "DP 2"
ENGINE = "torch"
"""No other has such groups."""
SHARE = 0.5
IDLE = Point("idle", idle_s=5.0)
IDLE_CORES = Figure("idle_cores", "CPU time without requests", "% of a core", 100.0)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names in a model's configuration: only with experts do ranks share their steps."""
WHY_NO_WAVES = (
    "Waves, in which idle ranks step along until all have asked each other and a coordinator ends the wave, do not "
    "exist here, so they cannot be measured: ranks share steps only if experts are spread over them (--ep), and then "
    "the rank that has work tells the others how far to run ahead. Without work all sleep. docs/performance.md has the "
    "messages of both ways, simulated."
)


def cases_of(bench: Workbench) -> list[ServerCase]:
    """Experts are spread if the model has any."""
    config = read_json_object(bench.options.model_path / "config.json")
    spread = ("--ep",) if any(config.get(name) for name in EXPERTS) else ()
    return [REPLICAS, ServerCase(GROUP, ("--prefill", "0", "--decode", "1", "--dp", "2", *spread))]


def _points(bench: Workbench, basis: Basis) -> list[Point]:
    return [IDLE, *([] if bench.options.is_short else [basis.at(SHARE)])]


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    return [Wish(NAME, 2, tuple(_points(bench, basis)))] if bench.options.engine == ENGINE else []


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    if bench.options.engine != ENGINE:
        why = f"Not measured: engine {bench.options.engine} has no data-parallel groups."
        return [Section(TITLE, why, WHY_NO_WAVES)]
    return [section_of(bench.rows(NAME, cases_of(bench), _points(bench, basis)))]


def section_of(rows: Sequence[Row]) -> Section:
    loaded = [row for row in rows if row["point"] != IDLE.name]
    found = [
        *effects(rows, (IDLE_CORES,), REPLICAS.name, [GROUP], [IDLE.name]),
        *effects(loaded, (TTFT_P90, GAP_P99), REPLICAS.name, [GROUP], list(dict.fromkeys(r["point"] for r in loaded))),
    ]
    idle = {name: median(good(rows, name, IDLE.name), IDLE_CORES.name) for name in (REPLICAS.name, GROUP)}
    cores = [(name, IDLE_CORES.text(value)) for name, value in idle.items() if value is not None]
    return Section(
        TITLE,
        effects_sentence(found) + unmeasured(rows, (REPLICAS.name, GROUP)),
        f"Two ranks of one worker, with spread experts if the model has some, beside two workers. {WHY_NO_WAVES}",
        (
            *((Table(("idle", IDLE_CORES.label), tuple(cores)),) if cores else ()),
            *((rows_table(loaded),) if loaded else ()),
            effects_table(found),
        ),
        notes=failures(rows),
    )
