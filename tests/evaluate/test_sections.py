"""Sections of measured rows: which cases they compare, at which loads, and what they say of cases that failed."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest

from kvrelay.bench.formats import FileFormat
from kvrelay.bench.prefixes.measure import PrefixOptions, measure_prefixes
from kvrelay.bench.progress import ProgressBar
from kvrelay.bench.report.metrics import FIGURES
from kvrelay.core.step_cost import StepCost, StepWork
from kvrelay.evaluate.calibration import Basis
from kvrelay.evaluate.findings import Section
from kvrelay.evaluate.load import EvaluatedLoad
from kvrelay.evaluate.options import SHORT
from kvrelay.evaluate.plan import Pace, Plan, Share
from kvrelay.evaluate.sections import arrangements, chunks, groups, loads, policies, prefixes, ratios, spent, transfers
from kvrelay.evaluate.shown import failures
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.trial import Candidate, Outcome


def rows(case: str, points: dict[str, float], ttft_s: float, **more: Any) -> list[dict[str, Any]]:
    """Two rounds that differ by 1 ms; times grow with the rate."""
    return [
        {
            **dict.fromkeys((*FIGURES, "tokens_per_s"), 0.5),
            **{"case": case, "point": point, "round": number, "error": "", "rate": rate, "concurrency": 0},
            **{"ttft_p90_s": ttft_s * rate + number / 1e3, "ttft_p50_s": ttft_s * rate + number / 1e3, "remote": 0.0},
            **more,
        }
        for number in (1, 2)
        for point, rate in points.items()
    ]


def shown(section: Section) -> dict[tuple[str, str], str]:
    """The verdict on first tokens, by load and difference."""
    table = next(table for table in section.tables if table.head[-1] == "shown")
    return {(row[0], f"{row[2]} against {row[4]}"): row[-1] for row in table.rows if "first tokens" in row[1]}


def test_one_pair_is_compared_with_replicas_and_ranks_at_each_rate() -> None:
    at = {"2 requests/s": 2.0, "3 requests/s": 3.0, "16 clients": 1.0}
    failed = [row | {"error": "no second core"} for row in rows("TP 2", at, 0.1)]
    section = arrangements.section_of([*rows("two replicas", at, 0.2), *rows("1P1D", at, 0.1), *failed], list(at))
    assert shown(section) == {(point, "1P1D against two replicas"): "yes" for point in list(at)[:2]}
    assert "At 3 requests/s: P90 of first tokens: 1P1D 302 ms, two replicas 602 ms (-50%)." in section.sentence
    assert section.sentence.endswith("TP 2: not measured.")
    assert section.notes == ("TP 2, 6 of 18 turns have no figures: no second core",)
    without = arrangements.section_of([*rows("two replicas", at, 0.2), *rows("1P1D", at, 0.1)], list(at), "9 heads")
    assert without.sentence.endswith("TP 2: not measured.")
    assert without.notes == ("TP 2 was not measured: 9 heads",)


def test_chunks_are_compared_with_whole_prompts() -> None:
    at, lengths = {"2 requests/s": 2.0}, (32, 512, 4096)
    measured = [*rows("chunks of 32", at, 0.3), *rows("chunks of 512", at, 0.2), *rows("whole prompts", at, 0.2)]
    times = (1.0, 2.0, 3.0)
    outcome = Outcome(True, 0.9, 1.0, 0.9, 1.0, 1.0, 10.0, times, times, 0.1, ())
    simulated = [(one, 1.0, outcome) for one in (Candidate(0, 0, 2), Candidate(1, 1, 0))]
    section = chunks.section_of(measured, simulated, lengths, 2.0)
    assert shown(section) == {
        ("2 requests/s", "chunks of 32 against whole prompts"): "yes",
        ("2 requests/s", "chunks of 512 against whole prompts"): "not shown",
    }
    firsts, gaps = section.plots[0].lines
    assert [x for x, _ in firsts.points] == [32.0, 512.0, 4096.0]
    assert gaps.points == tuple((float(length), 500.0) for length in lengths)


def test_loads_are_told_at_their_ends_and_drawn_with_poisson_arrivals() -> None:
    at = {"1 requests/s": 1.0, "4 requests/s": 4.0, "1 requests/s, even": 1.0, "4 requests/s, even": 4.0}
    measured = [*rows("two replicas", at, 0.2), *rows("1P1D", at, 0.1)]
    section = loads.open_section(measured, list(at))
    assert "At 4 requests/s: " in section.sentence
    assert "At 4 requests/s, even: " in section.sentence
    assert "At 1 " not in section.sentence
    assert len(shown(section)) == 4
    for line in section.plots[0].lines:
        assert [x for x, _ in line.points] == [1.0, 4.0]
    closed = {"1 client": 1.0, "64 clients": 64.0}
    section = loads.closed_section(
        [row | {"concurrency": row["rate"]} for row in rows("1P1D", closed, 0.1)], list(closed)
    )
    assert section.title == "From 1 to 64 clients"
    assert section.sentence == "Not shown: nothing to compare was measured."


def test_transfers_are_compared_with_the_first_way() -> None:
    at = {"2 requests/s": 2.0}
    names = [f"{transport} {send_type}" for transport, send_type in transfers.WAYS[:2]]
    section = transfers.section_of([*rows(names[0], at, 0.2), *rows(names[1], at, 0.1)], [*names, "shm PUT"])
    assert shown(section) == {("2 requests/s", "p2p PUT_ASYNC against p2p PUT"): "yes"}
    assert section.sentence.endswith("shm PUT: not measured.")


def test_the_order_of_the_ways_is_explained_by_the_phases_that_differ() -> None:
    phases = {
        "p2p PUT_ASYNC": {"prefill": 0.020, "transfer": 0.004},
        "p2p GET": {"prefill": 0.020, "transfer": 0.002, "grant": 0.001},
        "p2p PUT": {"prefill": 0.010, "transfer": 0.002},
    }
    at = {"2 requests/s": 2.0}
    measured = [row for name, own in phases.items() for row in rows(name, at, 0.1, phases=own)]
    section = transfers.section_of(measured, list(phases))
    assert section.tables[-1].rows == (
        ("prefill", "20.00", "20.00", "10.00"),
        ("transfer", "4.00", "2.00", "2.00"),
        ("grant", "0.00", "1.00", "0.00"),
        ("all", "24.00", "23.00", "12.00"),
    )
    assert "here it is PUT 12.0 ms, GET 23.0 ms, PUT_ASYNC 24.0 ms." in section.sentence
    assert "p2p PUT against p2p GET: -11.0 ms, of which prefill -10.0, grant -1.0, transfer +0.0." in section.sentence
    # 2 of 12, 3 of 23 and 4 of 24 ms.
    assert section.sentence.endswith("transfer, attach: of a first token PUT 17%, GET 13%, PUT_ASYNC 17%.")
    noisy = [row | {"phases": {"prefill": 0.02 * row["round"]}} for name in phases for row in rows(name, at, 0.1)]
    assert "not shown to differ" in transfers.section_of(noisy, list(phases)).sentence


def test_ratios_are_compared_with_2p2d_and_a_change_of_roles_with_one_that_started_so() -> None:
    at = {"9 requests/s": 9.0}
    firsts = {"1P3D": 0.3, "2P2D": 0.1, "3P1D": 0.2, ratios.CHANGED: 0.3}
    measured = [row for name, ttft_s in firsts.items() for row in rows(name, at, ttft_s)]
    figures = {"requests_per_s": 9.0, "ttft_mean_s": 0.1, "goodput": 1.0}
    checks = [
        {
            "case": case,
            "point": "9 requests/s",
            "measured": {**figures, "e2e_p50_s": e2e_s},
            "simulated": {**figures, "e2e_p50_s": 1.0 - e2e_s},
        }
        for case, e2e_s in (("1P3D", 0.2), ("2P2D", 0.3), ("3P1D", 0.4))
    ]
    section = ratios.section_of(measured, checks)
    assert shown(section) == {
        ("9 requests/s", "1P3D against 2P2D"): "yes",
        ("9 requests/s", "3P1D against 2P2D"): "yes",
        ("9 requests/s", f"{ratios.CHANGED} against 1P3D"): "not shown",
    }
    assert "is not shown to differ from one that started so." in section.sentence
    assert section.sentence.endswith("1P3D has the fastest median answers; the simulator says 3P1D.")
    assert section.tables[-1].rows[0] == ("9 requests/s", "1P3D", "100", "100", "200", "800")


def test_a_mock_engine_takes_a_step_as_long_as_the_calibrated_costs_say() -> None:
    step = StepCost(step_s=0.02, prefill_s=0.03, prefill_token_s=2e-5, pair_s=1e-8, decode_s=1e-4, context_s=1e-7)
    load = EvaluatedLoad((Arrival(time_s=0.0, prompt_tokens=900, answer_tokens=200),), 32000, 4096)
    flags = ratios.mock_flags(step, load)
    times = {flag: float(value) for flag, value in zip(flags[2::2], flags[3::2], strict=True)}
    # 3 decodes over 1,000 tokens each; then the mean prompt, of 900 tokens.
    decodes = StepWork(num_decodes=3, num_context_tokens=3000)
    assert times["--decode-base-s"] + 3 * times["--decode-seq-s"] == pytest.approx(step.step_seconds(decodes))
    prefill_s = times["--prefill-base-s"] + 900 * times["--prefill-token-s"]
    assert prefill_s == pytest.approx(step.prefill_seconds(900))


def test_policies_are_compared_with_the_default_at_the_highest_rate() -> None:
    at = {"1 requests/s": 1.0, "3 requests/s": 3.0}
    names = (*policies.VARIANTS, policies.AGGREGATED)
    measured = [row for number, name in enumerate(names) for row in rows(name, at, 0.1 * (number + 1))]
    section = policies.section_of(measured, list(at))
    assert len(shown(section)) == 2 * (len(names) - 1)
    assert "always 902 ms, cost, auto 302 ms (+199%)" in section.sentence
    assert "1 requests/s:" not in section.sentence


def test_a_data_set_that_has_changed_is_another_case(tmp_path: Path) -> None:
    path = tmp_path / "asked.jsonl"
    path.write_text("one")
    before = prefixes.case_of(path)
    assert prefixes.case_of(path) == before
    path.write_text("two")
    assert prefixes.case_of(path) != before


def test_prefixes_of_a_data_set_and_what_caches_hit(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join("you are a helper " * 20 + letter for letter in string.ascii_lowercase[:20]) + "\n")
    report = measure_prefixes((path,), PrefixOptions(cache_blocks=prefixes.CACHE_BLOCKS), ProgressBar(None)).report
    section = prefixes.section_of([report], [FileFormat.DOLLY])
    assert section.sentence.startswith("lines.txt: 100% of 20 conversations begin with a prefix")
    (line,) = section.plots[0].lines
    # Two blocks of 128 characters each: of 40 only the first conversation's miss.
    assert line.points == tuple((float(size), 38 / 40) for size in prefixes.CACHE_BLOCKS)
    assert [row[0] for row in section.tables[1].rows] == ["dolly-15k"]
    assert len(prefixes.section_of([report], [None]).tables) == 1


def test_a_data_set_as_a_load_compares_both_arrangements() -> None:
    at = {"16 clients": 1.0}
    section = prefixes.load_section("x.json", "", [*rows("two replicas", at, 0.2), *rows("1P1D", at, 0.1)])
    assert shown(section) == {("16 clients", "1P1D against two replicas"): "yes"}
    assert section.title == "x.json as a load"


def test_a_group_is_compared_with_replicas_without_requests_too() -> None:
    loaded = [*rows("two replicas", {"2 requests/s": 2.0}, 0.2), *rows("DP 2", {"2 requests/s": 2.0}, 0.2)]
    idle = [
        {"case": case, "point": "idle", "round": number, "error": "", "idle_cores": cores + number / 1e4}
        for case, cores in (("two replicas", 0.01), ("DP 2", 0.02))
        for number in (1, 2)
    ]
    section = groups.section_of([*idle, *loaded])
    assert section.sentence.startswith(
        "At idle: CPU time without requests: DP 2 2.02 % of a core, two replicas 1.01 % of a core (+99%)."
    )
    assert section.tables[0].rows == (("two replicas", "1.01 % of a core"), ("DP 2", "2.02 % of a core"))
    assert shown(section) == {("2 requests/s", "DP 2 against two replicas"): "not shown"}
    assert "Waves" in section.about
    assert groups.section_of(idle[:2]).sentence.endswith("DP 2: not measured.")


def test_what_was_left_out_is_named_with_what_was_planned() -> None:
    loads = Share("loads", {"1 client": 6, "16 clients": 16}, 30.0, ("64 clients",))
    late = (Share("policies", {"a": 6}, 30.0), Share("policies", {}, 0.0, ("b",)))
    plans = {
        # What the first plan leaves out of a later section counts only if there is no time for it then.
        "loads": Plan((loads, Share("policies", {}, 0.0, ("a", "b"))), is_held=True),
        "policies": Plan(late),
        "groups": Plan((Share("groups", {}, 0.0, ("idle",)),)),
        "sizes": Plan((Share("sizes", {}, 0.0, ("sizes",)),)),
    }
    pace = Pace(8.0, 1.0, 2.0, 0.5)
    section = spent.section_of(Basis({}, pace, 4), plans, SHORT, {"loads": 33.0, "search": 9.0, "policies": 20.0})
    left_out = "loads (64 clients), policies (b), groups (idle), sizes (sizes)."
    assert section.sentence.startswith(f"Not shown, since there was no time: {left_out}")
    assert "Requests were sent 4 times as short" in section.sentence
    assert "in one start" in section.sentence
    assert section.tables[0].rows == (
        ("loads", "30", "33", "6 to 16", "1"),
        ("search", "", "9", "", ""),
        ("policies", "30", "20", "6", "1"),
        ("groups", "0", "", "", "1"),
        ("sizes", "0", "", "", "1"),
    )


def test_cases_say_how_many_answers_are_missing() -> None:
    measured = [row | {"unanswered": 2} for row in rows("TP 2", {"3 requests/s": 3.0}, 0.1)]
    assert failures(measured) == ("TP 2: 4 answers did not come in time and are not counted.",)
    assert failures([row | {"error": "gone"} for row in measured]) == ("TP 2, 2 of 2 turns have no figures: gone",)
