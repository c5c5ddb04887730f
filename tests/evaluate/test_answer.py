"""The arithmetic and the words of the answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvrelay.certify.findings import CertifyReport, Group, Row, Series, Verdict
from kvrelay.core.step_cost import StepCost
from kvrelay.errors import InvalidInputError
from kvrelay.evaluate.load import fitted
from kvrelay.evaluate.options import EvaluateOptions
from kvrelay.evaluate.sections import answer, chunks, larger, link, policies, sizes
from kvrelay.evaluate.sections.accuracy import Accuracy, accuracy_of, sentence_of
from kvrelay.placement.base import Objectives
from kvrelay.simulate.advise import Advice
from kvrelay.simulate.arrival import Arrival
from kvrelay.simulate.costs import Costs
from kvrelay.simulate.trial import Candidate, Outcome
from kvrelay.simulate.verdict import Capacity, Measured

SPLIT, TOGETHER = Candidate(1, 3, 0), Candidate(0, 0, 4)
ACCURATE = Accuracy((0.02, -0.04), (0.1,), (-0.05,), (3, 4))


def options(price: float | None = None, slots: int = 4) -> EvaluateOptions:
    return EvaluateOptions(
        "m",
        Path("m"),
        Path("out"),
        500.0,
        25.0,
        load_spec="poisson",
        slots=slots,
        price=price,
        command="kvrelay evaluate",
    )


def outcome(goodput: float = 0.97, good_tokens_per_s: float = 1000.0) -> Outcome:
    times = (10.0, 20.0, 30.0)
    return Outcome(True, goodput, 1.0, 0.9, 1.0, 1.0, good_tokens_per_s, times, times, 0.1, ())


def capacity(candidate: Candidate, rate: float, *, is_least: bool = False) -> Capacity:
    return Capacity(candidate, (rate, rate, rate), ((rate, 0.95),), is_least)


@pytest.mark.parametrize(
    ("split", "together", "words"),
    [
        (8.0, 5.0, "5 requests/s: below, both hold the objectives and aggregated is simpler; above, 1P3D alone"),
        (
            5.0,
            8.0,
            "5 requests/s: below, both hold the objectives and aggregated is simpler; above, 4 aggregated alone",
        ),
        (6.0, 0.0, "none: 1P3D alone holds them up to 6 requests/s, 4 aggregated at no rate that was tried"),
        (5.0, 5.0, "none: both hold the objectives up to 5 requests/s"),
        (0.0, 0.0, "neither holds the objectives"),
    ],
)
def test_the_rate_at_which_the_answer_turns(split: float, together: float, words: str) -> None:
    assert answer.turning_sentence((capacity(SPLIT, split), capacity(TOGETHER, together))).startswith(words)


def test_the_answer_is_sure_only_above_the_simulators_error() -> None:
    margin = answer.margin_of((capacity(SPLIT, 5.5), capacity(TOGETHER, 5.0)))
    assert margin == pytest.approx(0.1)
    assert answer.sureness_sentence(margin, ACCURATE).startswith(
        "the margin of 10% is above the simulator's error of up to 4% in throughput (of first tokens up to 10%)"
    )
    assert answer.sureness_sentence(0.03, ACCURATE).startswith("not sure: the margin of 3% is within")
    off = answer.sureness_sentence(0.03, Accuracy((0.04,), (0.1,), (), goodput=(-0.2, 0.66)))
    assert (
        "up to 4% in throughput (of first tokens up to 10%, of requests within the objectives up to 66 points)" in off
    )
    doubtful = answer.sureness_sentence(margin, Accuracy((0.02,), (), (), (1, 3)))
    assert doubtful.startswith("not sure: the margin of 10% is above the simulator's error")
    assert doubtful.endswith("but it agreed with the machine on the faster of two arrangements for 1 of 3 loads")
    assert "3 of 4 loads" in answer.sureness_sentence(margin, ACCURATE)
    assert answer.sureness_sentence(margin, Accuracy((), (), ())).startswith("not at all")
    assert answer.margin_of((capacity(SPLIT, 5.0),)) is None
    assert answer.margin_of((capacity(SPLIT, 5.0), capacity(TOGETHER, 0.0))) is None


def test_the_price_is_of_all_slots() -> None:
    # 4 slots at 9 an hour are 0.01 a second: 10 per million tokens at 1,000 tokens a second. At 20 requests/s, of which
    # nine tenths are in time with 100 tokens each, 1,800 tokens a second: 5.56.
    best = Measured(SPLIT, outcome(), None)
    said = answer.price_sentence(options(9.0), best, capacity(SPLIT, 20.0), 100.0)
    assert said.startswith("10 per million answer tokens at your rate, 5.56 at 20 requests/s")
    assert answer.price_sentence(options(), best, capacity(SPLIT, 20.0), 100.0) == "not asked for (--price)"
    nothing = Measured(SPLIT, outcome(0.0, 0.0), None)
    assert answer.price_sentence(options(9.0), nothing, capacity(SPLIT, 0.0), 100.0) == "no answer in time"


def test_the_answer_names_decision_command_and_all_that_was_asked() -> None:
    advice = Advice(
        SPLIT,
        "split: it wins.",
        (Measured(SPLIT, outcome(), None), Measured(TOGETHER, outcome(0.5), None)),
        (capacity(SPLIT, 8.0), capacity(TOGETHER, 5.0)),
        Objectives(0.5, 0.025),
        2.0,
        {1: 1024},
    )
    load = fitted([Arrival(time_s=1.0, prompt_tokens=90, answer_tokens=20)], 1024, 100)
    asked = msgspec.structs.replace(options(9.0), engine="vllm", serve_flags=("--dtype", "float32"))
    section = answer.section_of(asked, load, advice, ACCURATE, "auto", "1P1D keeps more")
    assert section.title == "4 slots: together at your rate (2 requests/s), split as 1P3D above 5 requests/s"
    assert section.sentence == "Split: it wins."
    answers = dict(section.tables[0].rows)
    assert answers["run"].startswith("kvrelay serve MODEL --prefill 0 --decode 4")
    assert answers["run above that rate"].startswith("kvrelay serve MODEL --prefill 1 --decode 3")
    for name in ("run", "run above that rate"):
        assert answers[name].endswith(" --engine vllm --dtype float32"), "with what was measured"
    assert "90% of the first tokens come within 20 ms" in answers["objectives that hold"]
    assert section.notes == ("1 requests of the load were shortened to the context of 100 tokens.",)
    assert [line.name for line in section.plots[0].lines] == ["1P3D", "4 aggregated"]


@pytest.mark.parametrize(
    ("best", "rate", "words", "chosen"),
    [
        (SPLIT, 4.0, "together at your rate (4 requests/s), split as 1P3D above 5 requests/s", TOGETHER),
        (SPLIT, 6.0, "split as 1P3D", SPLIT),
        (TOGETHER, 6.0, "do not split: 4 aggregated", TOGETHER),
    ],
)
def test_a_split_that_wins_only_above_the_loads_rate_can_wait(
    best: Candidate, rate: float, words: str, chosen: Candidate
) -> None:
    capacities = (capacity(SPLIT, 8.0), capacity(TOGETHER, 5.0))
    advice = Advice(best, "", (), capacities, Objectives(0.5, 0.025), rate, {1: 1024})
    assert answer.decision_of(advice) == (words, chosen)


def test_errors_and_agreement_of_the_simulator() -> None:
    def check(case: str, point: str, measured: float, simulated: float) -> dict[str, object]:
        sides = {"measured": measured, "simulated": simulated}
        figures = {
            side: {"requests_per_s": 10 * value, "ttft_mean_s": value, "e2e_p50_s": value, "goodput": value / 4}
            for side, value in sides.items()
        }
        return {"case": case, "point": point, **figures}

    checks = [
        *(check("1P1D", "slow", 1.0, 1.1), check("two replicas", "slow", 2.0, 1.8)),
        *(check("1P1D", "fast", 3.0, 3.3), check("two replicas", "fast", 2.0, 4.0)),
    ]
    found = accuracy_of(checks)
    assert found.throughput == pytest.approx((0.1, -0.1, 0.1, 1.0))
    assert found.worst_throughput == pytest.approx(1.0)
    assert found.goodput == pytest.approx((0.025, -0.05, 0.075, 0.5))
    assert found.worst_goodput == 0.5
    assert "within the objectives by -5 to +50 points" in sentence_of(found)
    assert found.same_choice == (1, 2)
    assert "throughput by -10% to +100%" in sentence_of(found)
    assert sentence_of(accuracy_of([])).startswith("Not shown")


def test_the_link_that_hides_a_hand_off_carries_the_kv_in_the_time_of_the_prefill() -> None:
    # 1,000 tokens in 10 + 90 ms, 500 bytes each: 5 MB/s.
    costs = Costs(
        step=StepCost(step_s=0.01, prefill_s=0.01, prefill_token_s=9e-5, pair_s=0.0),
        link_bytes_per_s=2.5e6,
        token_bytes=500,
    )
    assert link.hiding_bytes_per_s(costs, 1000) == pytest.approx(5e6, rel=1e-6)
    section = link.section_of(costs, 128)
    needed = 500 * 128 / (0.01 + 128 * 9e-5) / 1e6
    assert section.tables[0].rows == (("128", "0.06", "21.5", f"{needed:.3g}", "0.0238", "26.10"),)
    assert "does not hide hand-offs" in section.sentence
    fast = msgspec.structs.replace(costs, link_bytes_per_s=1e9)
    assert "that was measured here has 1e+03 MB/s" in link.section_of(fast, 128).sentence
    assert "and hides hand-offs" in link.section_of(fast, 128).sentence
    assert "The link was not measured" in link.section_of(fast, 128, not_measured=["link_bytes_per_s"]).sentence


def test_a_certified_link_is_compared_by_its_best_bandwidth(tmp_path: Path) -> None:
    lines = (
        Series("bandwidth", "nixl", ((4096.0, 1e6), (1e6, 6e6))),
        Series("bandwidth", "raw copy (nixl)", ((1.0, 9e9),)),
    )
    row = Row(Group.FAST, "bandwidth", "nixl", Verdict.PASS, "whole", series=lines)
    report = CertifyReport("d", "a host", "0", "m", "c", "2026", (row,))
    path = tmp_path / "certify.json"
    path.write_bytes(msgspec.json.encode(report))
    read = link.read_certificate(path)
    assert read == report
    assert link.certified(report, 5e6) == ["The certified path nixl (a host) has 6 MB/s and hides hand-offs."]
    assert link.certified(report, 7e6) == ["The certified path nixl (a host) has 6 MB/s and does not hide hand-offs."]
    assert "no bandwidth" in link.certified(msgspec.structs.replace(report, rows=()), 1.0)[0]
    path.write_text("[]")
    with pytest.raises(InvalidInputError, match=r"not the certify\.json"):
        link.read_certificate(path)


def test_sizes_that_differ_little_are_no_answer() -> None:
    even = [(SPLIT, 1.0, outcome(0.97)), (TOGETHER, 1.0, outcome(0.96))]
    assert sizes.best_sentence(even, 2.0, 1.0) == "At 2 requests/s no difference is shown: all keep 96% to 97%."
    apart = [(SPLIT, 1.0, outcome(0.97)), (TOGETHER, 1.0, outcome(0.5))]
    assert (
        sizes.best_sentence(apart, 2.0, 1.0) == "At 2 requests/s 1P3D keeps most requests within the objectives, 97%."
    )


def test_larger_clusters_have_as_many_slots() -> None:
    for slots in larger.SLOTS:
        found = larger.candidates_for(slots, (1, 2), 2048)
        assert {(one.prefill + one.decode + one.both) * one.tp for one in found} == {slots}
        assert sum(not one.is_split for one in found) == 2


def test_chunks_that_keep_most_are_named_for_both_kinds() -> None:
    shares = ((0, 32, 0.5), (1, 32, 0.9), (0, 2048, 0.8), (1, 2048, 0.905))
    found = [(Candidate(split, split, 2 - 2 * split, 1, chunk), 1.0, outcome(share)) for split, chunk, share in shares]
    said = chunks.kept_sentence(found)
    assert "aggregated, chunks of 2048 keep most requests within the objectives, 80% (others 50%)" in said
    assert "split, all chunk lengths keep 90% of the requests" in said


def test_an_order_is_named_only_where_it_is_shown() -> None:
    def rows(*p90_s: float) -> list[dict[str, object]]:
        cases = [case for case in policies.ORDERS for _ in (1, 2)]
        return [
            {"case": case, "point": "9", "round": 1 + at % 2, "error": "", "ttft_p90_s": value}
            for at, (case, value) in enumerate(zip(cases, p90_s))
        ]

    assert policies.order_sentence(rows(0.3, 0.31, 0.1, 0.11), ["9"]).endswith(
        "prefill-first has earlier first tokens at 9"
    )
    assert policies.order_sentence(rows(0.1, 0.11, 0.3, 0.31), ["9"]).endswith(
        "decode-first has earlier first tokens at 9"
    )
    assert "nothing is shown" in policies.order_sentence(rows(0.1, 0.3, 0.2, 0.25), ["9"])
