"""The pure half of chaos: the schedule, the verdict on answers, and the figures of the report."""

from __future__ import annotations

from array import array
from collections import Counter
from random import Random

import pytest
from tests.chaos.answers import KnownPrompt, Verdict, fresh_prompt, judge, keep_stable, make_prompts
from tests.chaos.plan import (
    AGAINST_WORKERS,
    CRASHES,
    KILL_WINDOW_S,
    MAX_KILLS_PER_WINDOW,
    MIN_DURATION_S,
    ROLES,
    START_QUIET_S,
    FaultKind,
    make_plan,
)
from tests.chaos.report import (
    AskedPrompt,
    FaultRecord,
    FaultSummary,
    Spread,
    problems_of,
    spread,
    summarise_faults,
    targets_of,
    worst_pauses,
)
from tests.draws import seeds

from kvrelay.errors import ConfigError


def test_the_same_seed_gives_the_same_plan_and_another_seed_another():
    assert make_plan(120, 7) == make_plan(120, 7)
    assert make_plan(120, 7) != make_plan(120, 8)


@pytest.mark.parametrize("with_ranks", [False, True])
@pytest.mark.parametrize("seed", seeds(3, 20))
def test_a_plan_has_every_kind_in_order_of_time_and_ends_early_enough(seed, with_ranks):
    plan = make_plan(120, seed, quiet_end_s=10, with_ranks=with_ranks, with_broker=with_ranks)
    times = [fault.at_s for fault in plan]
    assert times == sorted(times)
    assert times[0] >= START_QUIET_S
    assert times[-1] < 110
    assert {fault.kind for fault in plan} == set(FaultKind) - (
        {FaultKind.KILL_PLANNER} if with_ranks else {FaultKind.KILL_RANK, FaultKind.KILL_BROKER, FaultKind.KILL_PLANNER}
    )
    assert all((fault.role in ROLES) == (fault.kind in AGAINST_WORKERS) for fault in plan)
    assert all(0 <= fault.choice < 1 and 0 <= fault.severity < 1 for fault in plan)


@pytest.mark.parametrize("with_ranks", [False, True])
@pytest.mark.parametrize("seed", seeds(2, 10))
def test_kills_stay_below_what_a_supervisor_calls_a_crash_loop(seed, with_ranks):
    plan = make_plan(600, seed, interval_s=0.3, with_ranks=with_ranks)
    crashes = [fault for fault in plan if fault.kind in CRASHES]
    ranks = {"kill_rank prefill", "kill_rank decode"} if with_ranks else set()
    assert {fault.name for fault in crashes} == {"kill prefill", "kill decode", "kill_frontend", *ranks}
    for role in ("", *ROLES):
        times = [fault.at_s for fault in crashes if fault.role == role]
        assert len(times) > MAX_KILLS_PER_WINDOW
        for number, at_s in enumerate(times):
            assert sum(at_s <= other < at_s + KILL_WINDOW_S for other in times[number:]) <= MAX_KILLS_PER_WINDOW


@pytest.mark.parametrize("duration_s", [0, 9.9])
def test_a_duration_without_room_for_faults_is_refused(duration_s):
    with pytest.raises(ConfigError, match=f"duration must be at least {MIN_DURATION_S:g} s"):
        make_plan(duration_s, 0)


def test_the_shortest_duration_that_is_not_refused_has_one_fault():
    assert [fault.at_s for fault in make_plan(MIN_DURATION_S, 0)] == [START_QUIET_S]


@pytest.mark.parametrize(
    ("got", "verdict"),
    [
        ([1, 2, 3, 4], Verdict.RIGHT),
        ([1, 2, 4], Verdict.MISSING),
        ([], Verdict.MISSING),
        ([1, 2, 3], Verdict.MISSING),
        ([1, 2, 2, 3, 4], Verdict.REPEATED),
        ([1, 2, 3, 4, 4], Verdict.REPEATED),
        ([1, 2, 5, 4], Verdict.WRONG),
        ([1, 5], Verdict.WRONG),
        ([9, 9, 9, 9, 9], Verdict.WRONG),
        ([4, 3, 2, 1], Verdict.WRONG),
    ],
)
def test_an_answer_is_judged_against_the_expected_tokens(got, verdict):
    assert judge((1, 2, 3, 4), got) is verdict


def test_only_prompts_with_one_answer_in_all_runs_are_kept():
    prompts = [KnownPrompt((n,), 2, stream=True) for n in range(4)]
    runs = [[[1, 2], [3, 4], [], [5]], [[1, 2], [3, 5], [], [5]]]
    kept = keep_stable(prompts, runs)
    assert [(prompt.token_ids, prompt.answer) for prompt in kept] == [((0,), (1, 2)), ((3,), (5,))]


def test_prompts_are_mixed_reproducible_and_within_the_vocabulary():
    prompts = make_prompts(60, 3, vocab_size=100, max_len=400, with_sampling=True)
    assert prompts == make_prompts(60, 3, vocab_size=100, max_len=400, with_sampling=True)
    assert {len(prompt.token_ids) for prompt in prompts} == {8, 40, 90, 150, 200, 400}
    assert all(16 <= token < 100 for prompt in prompts for token in prompt.token_ids)
    assert Counter(prompt.stream for prompt in prompts) == {True: 48, False: 12}
    assert sum(prompt.temperature > 0 for prompt in prompts) == 15
    assert len({prompt.token_ids[:75] for prompt in prompts if len(prompt.token_ids) >= 150}) < sum(
        len(prompt.token_ids) >= 150 for prompt in prompts
    )
    assert not any(p.temperature for p in make_prompts(60, 3, vocab_size=100, max_len=400, with_sampling=False))


def test_a_fresh_prompt_shares_half_of_a_known_one():
    prompts = make_prompts(30, 3, vocab_size=1000, max_len=400, with_sampling=False)
    fresh = fresh_prompt(Random(1), prompts, vocab_size=1000)
    (like,) = {p for p in prompts if p.token_ids[: len(p.token_ids) // 2] == fresh.token_ids[: len(p.token_ids) // 2]}
    assert len(fresh.token_ids) == len(like.token_ids)
    assert fresh.token_ids != like.token_ids
    assert fresh.answer == ()
    assert fresh_prompt(Random(1), prompts, vocab_size=1000) == fresh


def request(begin_s: float, arrivals_s: list[float], end_s: float, verdict: Verdict = Verdict.RIGHT) -> AskedPrompt:
    return AskedPrompt(begin_s, True, array("d", arrivals_s), end_s, verdict, "what it was")


def test_the_longest_pause_is_one_that_the_fault_can_have_caused():
    record = request(0.0, [1.0, 5.0, 5.5, 8.5, 30.0], 30.5)
    assert record.longest_pause_s(0.5, 1.0) == 4.0  # the gap from 1 to 5 began within a second
    assert record.longest_pause_s(0.5, 0.1) == 1.0  # only the wait for the first token was under way
    assert record.longest_pause_s(5.2, 2.0) == 3.0
    assert record.longest_pause_s(5.2, 10.0) == 21.5
    assert record.longest_pause_s(40.0, 10.0) is None
    assert record.longest_pause_s(-1.0, 10.0) is None


def test_faults_are_summed_up_by_name():
    requests = [request(0.0, [1.0, 2.0, 6.0], 6.5), request(1.5, [1.7, 2.1], 2.2), request(0.0, [0.1], 0.2)]
    faults = [
        FaultRecord("kill decode", 1.6, 4.6, 3.0),
        FaultRecord("kill decode", 20.0, 25.0, 5.0),
        FaultRecord("burst", 0.05, 0.06),
        FaultRecord("freeze decode", 4.0, 9.0, 1.0),
        FaultRecord("drain decode", 5.9, 7.0, 1.1),
        FaultRecord("kill_frontend", 30.0, 31.0, 1.0, num_reconnected=3),
        FaultRecord("kill_frontend", 40.0, 41.0, 1.0, num_reconnected=2),
    ]
    summaries = summarise_faults(faults, requests, 1.0)
    assert summaries["kill decode"].count == 2
    assert summaries["kill decode"].recovery == Spread(2, 4.0, 4.98, 5.0)
    assert summaries["kill decode"].pause is not None
    assert (summaries["kill decode"].pause.count, summaries["kill decode"].pause.max_s) == (2, 4.0)
    assert {name: summary.num_reconnected for name, summary in summaries.items() if summary.num_reconnected} == {
        "kill_frontend": 5
    }
    assert summaries["burst"].recovery is None
    assert summaries["burst"].pause is not None
    assert summaries["burst"].pause.count == 2
    # These two last at the same time, so neither has pauses of its own.
    assert [(summaries[name].num_alone, summaries[name].pause) for name in ("freeze decode", "drain decode")] == [
        (0, None),
        (0, None),
    ]


def test_the_worst_pauses_name_their_faults():
    requests = [request(10.0, [11.0, 12.0, 16.0], 16.5), request(11.5, [11.7, 12.1], 12.2)]
    faults = [FaultRecord("kill decode", 12.5, 14.0, 1.5), FaultRecord("freeze prefill", 2.0, 10.0, 1.0)]
    assert worst_pauses(requests, faults) == (
        "4.00 s before chunk 3; kill decode (+0.5 s)",
        "0.40 s before chunk 2; no fault",
    )
    assert worst_pauses(requests, faults, 1) == ("4.00 s before chunk 3; kill decode (+0.5 s)",)


def test_nothing_has_no_spread():
    assert spread([]) is None


def test_every_bad_request_and_every_unhealed_fault_is_a_problem():
    requests = [request(0, [], 1, verdict) for verdict in Verdict]
    faults = [
        FaultRecord("kill decode", 1.0, 3.0, 2.0),
        FaultRecord("freeze prefill", 3.0, 9.0, None, "it never came back"),
    ]
    problems = problems_of(requests, faults)
    assert [line.split(":")[0] for line in problems] == [
        "wrong", "missing", "repeated", "failed", "hung", "freeze prefill",
    ]  # fmt: skip


def killed(p99_s: float) -> FaultSummary:
    return FaultSummary(3, 0, None, 2, Spread(9, 0.1, p99_s, p99_s))


def test_targets_are_met_missed_or_not_measured():
    faults = {"kill decode": killed(1.4), "kill prefill": killed(3.9)}
    verdicts = Counter({Verdict.RIGHT: 90, Verdict.MISSING: 1, Verdict.REPEATED: 1})
    met = {target.name: (target.value, target.is_met) for target in targets_of(verdicts, 5, faults, 2.0, [0.2, 0.7])}
    assert met == {
        "wrong, missing, repeated": (2, False),
        "failed": (0, True),
        "hung": (0, True),
        "leaked blocks": (5, False),
        "pause P99 after SIGKILL of a worker, s": (3.9, True),
        "pause P99 after SIGKILL of a decode worker, s": (1.4, False),
        "end of a worker after SIGKILL of a rank, s": (0.7, True),
    }
    unmeasured = [target.name for target in targets_of(Counter(), 0, {}, 2.0) if target.is_met is None]
    assert unmeasured == [
        "pause P99 after SIGKILL of a worker, s",
        "pause P99 after SIGKILL of a decode worker, s",
        "end of a worker after SIGKILL of a rank, s",
    ]
