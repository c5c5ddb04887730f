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
    points_of,
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
SHARE = 0.5
IDLE = Point("idle", idle_s=5.0)
IDLE_CORES = Figure("idle_cores", "CPU time without requests", "% of a core", 100.0)
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Names in a model's configuration: only with experts do ranks share their steps."""
WAVES_OF_VLLM = (
    "With vLLM the ranks step in its waves: those without work run dummy batches until all have asked each other. "
    "docs/vllm.md has what they cost."
)
WHY_NO_WAVES = (
    "Waves, in which idle ranks step along until all have asked each other and a coordinator ends the wave, do not "
    "exist here, so they cannot be measured: ranks share steps only if experts are spread over them (--ep), and then "
    "the rank that has work tells the others how far to run ahead. Without work all sleep. docs/performance.md has the "
    "messages of both ways, simulated."
)


def cases_of(bench: Workbench) -> list[ServerCase]:
    """Experts are spread if the model has any."""
    spread = ("--ep",) if _has_experts(bench) else ()
    return [REPLICAS, ServerCase(GROUP, ("--prefill", "0", "--decode", "1", "--dp", "2", *spread))]


def _has_experts(bench: Workbench) -> bool:
    config = read_json_object(bench.options.model_path / "config.json")
    return any(config.get(name) for name in EXPERTS)


def _has_groups(bench: Workbench) -> bool:
    """vLLM refuses groups of a model without experts."""
    return bench.options.engine == "torch" or _has_experts(bench)


def _points(bench: Workbench, basis: Basis) -> list[Point]:
    return [IDLE, *([] if bench.options.is_short else [basis.at(SHARE)])]


def wishes(bench: Workbench, basis: Basis) -> list[Wish]:
    return [Wish(NAME, 2, tuple(_points(bench, basis)))] if _has_groups(bench) else []


def take(bench: Workbench, basis: Basis, advice: Advice) -> list[Section]:
    waves = WHY_NO_WAVES if bench.options.engine == "torch" else WAVES_OF_VLLM
    if not _has_groups(bench):
        return [Section(TITLE, "Not measured: vLLM has no data-parallel groups of a model without experts.", waves)]
    return [section_of(bench.rows(NAME, cases_of(bench), _points(bench, basis)), waves)]


def section_of(rows: Sequence[Row], waves: str = WHY_NO_WAVES) -> Section:
    """``waves``: why there are none, or whose."""
    loaded = [row for row in rows if row["point"] != IDLE.name]
    found = [
        *effects(rows, (IDLE_CORES,), REPLICAS.name, [GROUP], [IDLE.name]),
        *effects(loaded, (TTFT_P90, GAP_P99), REPLICAS.name, [GROUP], points_of(loaded)),
    ]
    idle = {name: median(good(rows, name, IDLE.name), IDLE_CORES.name) for name in (REPLICAS.name, GROUP)}
    cores = [(name, IDLE_CORES.text(value)) for name, value in idle.items() if value is not None]
    return Section(
        TITLE,
        effects_sentence(found) + unmeasured(rows, (REPLICAS.name, GROUP)),
        f"Two ranks of one worker, with spread experts if the model has some, beside two workers. {waves}",
        (
            *((Table(("idle", IDLE_CORES.label), tuple(cores)),) if cores else ()),
            *((rows_table(loaded),) if loaded else ()),
            effects_table(found),
        ),
        notes=failures(rows),
    )
