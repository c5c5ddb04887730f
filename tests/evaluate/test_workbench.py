"""Turns of cases: how often servers are started, in which order points come, and what happens without time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from kvrelay.bench.progress import ProgressBar
from kvrelay.certify.servers import LOG_TAIL, NotStartedError
from kvrelay.errors import FatalError
from kvrelay.evaluate import workbench
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.journal import NAME, Journal
from kvrelay.evaluate.load import Point, fitted
from kvrelay.evaluate.options import EvaluateOptions
from kvrelay.evaluate.plan import Pace, Plan, Share, Wish
from kvrelay.evaluate.sections import groups
from kvrelay.evaluate.workbench import NO_TIME, REPLICAS, SPLIT, PartBar, Workbench, why_of
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.arrival import Arrival

LOW, HIGH = Point("low", rate=1.0), Point("high", rate=2.0)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the bench does: starts of servers by their flags, and points with round and requests."""
    seen: list[str] = []

    @asynccontextmanager
    async def started(flags: Sequence[str], log: Path) -> AsyncIterator[None]:
        seen.append(f"start {' '.join(flags[-4:])}")
        yield

    async def measure(
        self: Workbench, cluster: object, point: Point, salt: int, number: int, num: int
    ) -> dict[str, Any]:
        seen.append(f"{point.name} {number}: {num}")
        return {"num": num}

    monkeypatch.setattr(workbench, "running_cluster", started)
    monkeypatch.setattr(Workbench, "measure", measure)
    return seen


def bench(folder: Path, *, is_held: bool, requests: dict[str, int] | None = None, resumes: bool = False) -> Workbench:
    options = EvaluateOptions("m", Path("m"), folder, 500.0, 25.0, load_spec="poisson", is_short=True)
    load = fitted([Arrival(time_s=0.0, prompt_tokens=8, answer_tokens=8)], 1024, 4096)
    plan = Plan((Share("loads", requests or {"low": 6, "high": 12}, 1.0),), is_held)
    found = Workbench(options, load, Journal(folder, {}, resumes=resumes), PartBar(ProgressBar(None)))
    return found.calibrated(options, load, 1, Pace(1.0, 1.0, 1.0, 1.0)).with_plan(plan)


def test_each_round_starts_each_server_and_every_other_one_goes_backwards(tmp_path: Path, done: list[str]) -> None:
    rows = bench(tmp_path, is_held=False).rows("loads", [REPLICAS, SPLIT], [LOW, HIGH])
    replicas, split = (f"start {' '.join(case.flags)}" for case in (REPLICAS, SPLIT))
    first, second = ["low 1: 6", "high 1: 12"], ["high 2: 12", "low 2: 6"]
    assert done == [replicas, *first, split, *first, split, *second, replicas, *second]
    assert [(row["round"], row["case"], row["point"]) for row in rows] == [
        (number, case.name, point.name) for number in (1, 2) for case in (REPLICAS, SPLIT) for point in (LOW, HIGH)
    ]
    assert {row["error"] for row in rows} == {""}


def test_a_held_server_does_its_rounds_in_one_start_and_none_that_are_done(tmp_path: Path, done: list[str]) -> None:
    bench(tmp_path, is_held=True).rows("loads", [SPLIT], [LOW, HIGH])
    assert done == [f"start {' '.join(SPLIT.flags)}", "low 1: 6", "high 1: 12", "high 2: 12", "low 2: 6"]
    done.clear()
    rows = bench(tmp_path, is_held=True, resumes=True).rows("loads", [SPLIT, REPLICAS], [LOW, HIGH])
    assert done[0] == f"start {' '.join(REPLICAS.flags)}"
    assert len(done) == 5
    assert len(rows) == 8


def test_a_point_that_the_plan_leaves_out_is_not_sent_and_says_so(tmp_path: Path, done: list[str]) -> None:
    shown = msgspec.structs.replace(HIGH, shown=("cost", "2 requests/s"))
    rows = bench(tmp_path, is_held=True, requests={"low": 6}).rows("loads", [SPLIT], [LOW, shown])
    assert done[1:] == ["low 1: 6", "low 2: 6"]
    assert [(row["case"], row["point"]) for row in rows if NO_TIME in row["error"]] == [("cost", "2 requests/s")] * 2


def test_a_later_run_takes_what_was_left_out_and_keeps_what_was_begun(tmp_path: Path, done: list[str]) -> None:
    wish = Wish("loads", 1, (LOW, HIGH))
    first = bench(tmp_path, is_held=False, requests={"low": 6})
    assert first.rest_of(wish) == wish
    first.rows("loads", [SPLIT], [LOW, HIGH])
    assert first.rest_of(wish).points == (HIGH,)
    # As if it had been interrupted before its last turn.
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join(lines[:-1]))
    done.clear()
    later = bench(tmp_path, is_held=False, requests={"low": 7, "high": 12}, resumes=True)
    assert later.rest_of(wish) == wish
    rows = later.rows("loads", [SPLIT], [LOW, HIGH])
    assert [what for what in done if not what.startswith("start")] == ["high 1: 12", "high 2: 12", "low 2: 6"]
    assert {row["error"] for row in rows} == {""}
    assert later.rest_of(wish).points == ()


def test_nothing_begins_that_would_end_after_the_budget(tmp_path: Path, done: list[str]) -> None:
    late = bench(tmp_path, is_held=False)
    late.ends_s = 0.0
    rows = late.rows("loads", [SPLIT, REPLICAS], [LOW, HIGH])
    assert done == []
    assert {row["error"] for row in rows} == {NO_TIME}
    # A later run has time again.
    again = bench(tmp_path, is_held=False, resumes=True)
    assert {row["error"] for row in again.rows("loads", [SPLIT], [LOW, HIGH])} == {""}
    assert len(done) == 6


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("kvrelay: tp 2 is\nwrong\nkvrelay: worker 0 ended", "tp 2 is wrong"),
        ("a log of vLLM\nkvrelay: vLLM refuses it\nkvrelay: worker 0", "vLLM refuses it"),
        (
            "kvrelay: the first\n" + "and a log\n" * 1000 + "kvrelay: worker 0",
            ("the first" + " and a log" * 90)[:LOG_TAIL],
        ),
        ("Segmentation fault", "kvrelay serve m did not start: Segmentation fault"),
    ],
)
def test_a_server_that_did_not_start_says_why_in_its_own_words(output: str, why: str) -> None:
    assert why_of(NotStartedError(["m"], output)) == why


def test_any_other_error_is_told_by_its_message() -> None:
    assert why_of(FatalError("no worker answers")) == "no worker answers"


def test_an_engine_without_groups_starts_none_and_the_section_says_so(tmp_path: Path, done: list[str]) -> None:
    found = bench(tmp_path, is_held=False)
    basis, advice = Basis({}, found.pace), cast(Advice, None)
    assert [wish.num_cases for wish in groups.wishes(found, basis)] == [2]
    (tmp_path / "config.json").write_text("{}")
    found.options = msgspec.structs.replace(found.options, engine="vllm", model_path=tmp_path)
    assert groups.wishes(found, basis) == []
    sentence = "Not measured: vLLM has no data-parallel groups of a model without experts."
    assert groups.take(found, basis, advice)[0].sentence == sentence
    assert done == []
    (tmp_path / "config.json").write_text('{"num_local_experts": 4}')
    assert [wish.num_cases for wish in groups.wishes(found, basis)] == [2], "vLLM has groups of a model with experts"
    assert groups.cases_of(found)[1].flags[-1] == "--ep"
