"""The waterfall as a function of marks: it adds up, clocks are aligned, and what does not fit is shown as such."""

from __future__ import annotations

import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.marks.conftest import Scene

from kvrelay.marks.clocks import Offset, offset_of
from kvrelay.marks.phases import Phase, Role
from kvrelay.marks.recorder import MAX_NUMBERS, Mark
from kvrelay.marks.run_queue import RunQueue
from kvrelay.marks.text import text_of
from kvrelay.marks.trace import MAX_ATTEMPTS, MAX_TRACE_BYTES, Trace
from kvrelay.marks.travel import MAX_BYTES, ProcessMarks, decode, encode
from kvrelay.marks.waterfall import Drafts, Waterfall, waterfall

P = Phase


def spans_of(shown: Waterfall, *phases: str) -> list[tuple[str, float, float]]:
    return [
        (span.phase, round(span.start_ms, 3), round(span.end_ms, 3)) for span in shown.spans if span.phase in phases
    ]


def test_a_local_request_adds_up() -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (1, P.TOKENISED), (3, P.ROUTED), (21, P.HEARD), (21, P.FIRST_TOKEN))
    scene.decode((4, P.RECEIVED), (5, P.ADMITTED), (7, P.PREFILL_STARTED), (20, P.SENT))
    scene.tell()
    scene.decode((49, P.SENT))
    scene.frontend((50, P.HEARD), (51, P.FINISHED))
    scene.tell()
    shown = scene.end(51)
    assert spans_of(shown, "tokenise", "route", "send", "admit", "wait", "prefill", "deliver", "decode", "answer") == [
        ("tokenise", 0, 1),
        ("route", 1, 3),
        ("send", 3, 4),
        ("admit", 4, 5),
        ("wait", 5, 7),
        ("prefill", 7, 20),
        ("deliver", 20, 21),
        ("decode", 20, 49),
        ("answer", 21, 51),
        ("deliver", 49, 50),
    ]
    assert shown.unattributed_ms == pytest.approx(0)
    assert (shown.place, shown.transfer, shown.estimates) == ("local", None, None)
    assert shown.ttft_ms == pytest.approx(21)


def remote(decode_clock_ms: float = 0.0, prefill_clock_ms: float = 0.0, *, is_told: bool = True) -> Scene:
    scene = Scene(decode_clock_ms, prefill_clock_ms)
    scene.frontend((0, P.RECEIVED), (1, P.TOKENISED), (2, P.ROUTED), (61, P.HEARD), (61, P.FIRST_TOKEN))
    scene.decode(
        *((3, P.RECEIVED), (4, P.ADMITTED), (6, P.LOCAL_ESTIMATE, 0.5)),
        *((6, P.REMOTE_ESTIMATE, 0.05), (6, P.PREFILL_QUEUED), (12, P.CLAIM_HEARD), (13, P.GRANTED)),
        *((56, P.TRANSFER_ENDED), (58, P.ATTACHED), (60, P.SENT)),
    )
    if is_told:
        scene.prefill(
            *((8, P.PULLED), (11, P.CLAIMED), (10, P.PREFILL_STARTED), (14, P.GRANT_HEARD), (30, P.TRANSFER_POSTED)),
            *((50, P.PREFILL_ENDED), (52, P.TRANSFER_POSTED, 4096.0), (52, P.DESCRIPTORS, 3.0)),
        )
    scene.tell()
    scene.frontend((100, P.FINISHED))
    return scene


def test_a_remote_request_adds_up() -> None:
    shown = remote().end(100)
    assert shown.place == "remote"
    assert spans_of(shown, "queue", "prepare", "prefill", "claim", "hand_over", "transfer", "attach", "report") == [
        ("queue", 6, 8),
        ("prepare", 8, 10),
        ("prefill", 10, 50),
        ("claim", 11, 14),
        ("transfer", 30, 56),
        ("hand_over", 50, 52),
        ("attach", 56, 58),
        ("report", 58, 60),
    ]
    assert shown.unattributed_ms == pytest.approx(0)
    assert (shown.transfer.bytes, shown.transfer.descriptors) == (4096, 3)
    assert (shown.estimates.local_s, shown.estimates.remote_s) == (0.5, 0.05)
    assert [(each.role, each.has_marks) for each in shown.processes] == [
        ("frontend", True),
        ("decode", True),
        ("prefill", True),
    ]


GRANT = ((12, P.CLAIM_HEARD), (13, P.GRANTED))


def _answered(scene: Scene, first_ms: int, *decode: tuple[float, Phase] | tuple[float, Phase, float]) -> Waterfall:
    """Of a worker whose engine schedules by itself. It tells of the first token at ``first_ms``, and of the rest at
    100."""
    scene.frontend((0, P.RECEIVED), (1, P.TOKENISED), (2, P.ROUTED), (first_ms, P.HEARD), (first_ms, P.FIRST_TOKEN))
    scene.decode((3, P.RECEIVED), (4, P.ADMITTED), *(mark for mark in decode if mark[0] < first_ms))
    scene.tell()
    scene.decode(*(mark for mark in decode if mark[0] >= first_ms), (98, P.SENT))
    scene.frontend((99, P.HEARD), (100, P.FINISHED))
    scene.tell()
    return scene.end(100)


def test_an_engine_that_schedules_by_itself_tells_its_phases() -> None:
    """It was preempted between the tokens at 50 and 70."""
    own = (5, P.TAKEN_IN), (8, P.PREFILL_STARTED), (28, P.SAMPLED), (29, P.SENT), (50, P.PREEMPTED), (70, P.RESUMED)
    shown = _answered(Scene(), 30, *own)
    assert spans_of(shown, "submit", "wait", "prefill", "report", "preempted", "decode", "engine") == [
        ("submit", 4, 5),
        ("wait", 5, 8),
        ("prefill", 8, 28),
        ("report", 28, 29),
        ("decode", 29, 50),
        ("preempted", 50, 70),
        ("decode", 70, 98),
    ]
    assert (shown.place, shown.unattributed_ms) == ("local", pytest.approx(0))


def test_kv_that_it_loads_before_it_goes_on_is_shown() -> None:
    scene = Scene()
    scene.prefill(
        *((7, P.PULLED), (9, P.TAKEN_IN), (10, P.PREFILL_STARTED), (20, P.SAVED, 64.0), (21, P.TRANSFER_POSTED)),
        *((11, P.CLAIMED), (14, P.GRANT_HEARD)),
        *((30, P.PREFILL_ENDED), (31, P.SAVED, 32.0), (32, P.TRANSFER_POSTED, 96.0), (32, P.DESCRIPTORS, 2.0)),
    )
    shown = _answered(
        scene,
        40,
        *((6, P.PREFILL_QUEUED), *GRANT, (36, P.TRANSFER_ENDED), (37, P.ATTACHED), (39, P.SENT)),
        *((41, P.TAKEN_IN), (43, P.LOADING), (46, P.LOADED, 96.0), (47, P.PREFILL_STARTED), (49, P.RESUMED)),
    )
    decode = spans_of(shown, "attach", "report", "submit", "load", "resume", "decode")
    assert decode == [
        ("attach", 36, 37),
        ("report", 37, 39),
        ("submit", 39, 41),
        ("load", 43, 46),
        ("resume", 47, 49),
        ("decode", 49, 98),
    ]
    assert spans_of(shown, "wait") == [("wait", 4, 6), ("wait", 9, 10), ("wait", 41, 43), ("wait", 46, 47)]
    assert spans_of(shown, "prepare", "prefill", "save", "hand_over", "transfer") == [
        ("prepare", 7, 9),
        ("prefill", 10, 30),
        ("hand_over", 20, 21),
        ("transfer", 21, 36),
        ("save", 30, 31),
        ("hand_over", 31, 32),
    ]
    assert [span.value for span in shown.spans if span.phase == "saved"] == [64, 32]
    assert (shown.place, shown.unattributed_ms) == ("remote", pytest.approx(0))


def test_kv_that_engines_move_by_themselves_is_shown() -> None:
    scene = Scene()
    scene.prefill((7, P.PULLED), (9, P.TAKEN_IN), (10, P.PREFILL_STARTED), (30, P.PREFILL_ENDED))
    scene.prefill((11, P.CLAIMED), (14, P.GRANT_HEARD))
    shown = _answered(
        scene,
        50,
        *((6, P.PREFILL_QUEUED), *GRANT, (33, P.ATTACHED), (34, P.FETCHING), (42, P.PREFILL_STARTED)),
        *((47, P.SAMPLED), (49, P.SENT)),
    )
    assert spans_of(shown, "prefill", "hand_over", "submit", "fetch", "report", "engine") == [
        ("prefill", 10, 30),
        ("hand_over", 30, 33),
        ("submit", 33, 34),
        ("fetch", 34, 42),
        ("prefill", 42, 47),
        ("report", 47, 49),
    ]
    assert (shown.place, shown.unattributed_ms) == ("remote", pytest.approx(0))


def test_a_worker_without_marks_is_shown_as_such_and_its_time_is_unattributed() -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (10, P.TOKENISED), (20, P.ROUTED), (80, P.FIRST_TOKEN), (100, P.FINISHED))
    shown = scene.end(100)
    assert [each.has_marks for each in shown.processes] == [True, False]
    assert shown.unattributed_ms == pytest.approx(60)
    assert "decode d: no marks" in text_of(shown)


def test_a_prefill_worker_without_marks_leaves_its_part_to_the_decode_worker() -> None:
    shown = remote(is_told=False).end(100)
    (whole,) = [span for span in shown.spans if span.phase == "remote"]
    assert (whole.start_ms, whole.end_ms) == (pytest.approx(6), pytest.approx(58))
    assert "told no marks" in whole.note


@given(st.floats(-1e7, 1e7), st.floats(-1e7, 1e7))
def test_clocks_that_are_far_apart_change_little(decode_clock_ms: float, prefill_clock_ms: float) -> None:
    shown, plain = remote(decode_clock_ms, prefill_clock_ms).end(100), remote().end(100)
    uncertain_ms = [each.clock_uncertainty_ms for each in shown.processes]
    assert None not in uncertain_ms
    names = [span.phase for span in plain.spans]
    assert sorted(span.phase for span in shown.spans) == sorted(names)
    for name in set(names):
        for one, other in zip(spans_of(shown, name), spans_of(plain, name), strict=True):
            assert one[1:] == pytest.approx(other[1:], abs=max(uncertain_ms) + 0.01)


def test_the_text_names_its_columns_and_units() -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (1, P.TOKENISED), (3, P.ROUTED), (21, P.HEARD), (21, P.FIRST_TOKEN))
    scene.frontend((40, P.LATE_TOKEN, 0.25), (45, P.MIGRATED, 1_867_776.0), (51, P.FINISHED))
    lines = text_of(scene.end(51)).splitlines()
    head = next(line for line in lines if line.startswith("PROCESS"))
    tokenise, late = (next(line for line in lines if f" {phase} " in line) for phase in ("tokenise", "late_token"))
    for name, value in (("PROCESS", "f"), ("PHASE", "tokenise")):
        assert tokenise[head.index(name) :].startswith(value)
    for name, value in (("FROM ms", "0.00"), ("TOOK ms", "1.00")):
        assert tokenise[: head.index(name) + len(name)].endswith(f" {value}")
    assert "0.0 to 51.0 ms" in head
    assert late.endswith("  0.25 s")
    assert any(line.endswith("  1,867,776 tokens") for line in lines)


def test_a_gap_below_zero_is_shown() -> None:
    """The entry was pulled before it was queued, and heard from before it was sent: no offset makes that right."""
    scene = Scene(5000.0)
    scene.frontend((0, P.RECEIVED), (2, P.TOKENISED), (10, P.ROUTED), (20, P.HEARD), (20, P.FIRST_TOKEN))
    scene.decode((4, P.RECEIVED), (5, P.ADMITTED), (26, P.SENT))
    scene.tell()
    scene.frontend((30, P.FINISHED))
    shown = scene.end(30)
    backwards = [span for span in shown.spans if span.end_ms < span.start_ms]
    assert [span.phase for span in backwards] == ["send", "deliver"]
    assert all("negative" in span.note for span in backwards)
    assert "negative" in text_of(shown)


def test_offsets_lie_between_the_bounds_that_messages_give() -> None:
    sent, heard = ((P.ROUTED, P.RECEIVED),), ((P.SENT, P.HEARD),)
    ours = [Mark(P.ROUTED, 10, 0.0), Mark(P.HEARD, 30, 0.0)]
    assert offset_of(ours, [Mark(P.RECEIVED, 105, 0.0), Mark(P.SENT, 120, 0.0)], sent, heard) == Offset(-92.5, 2.5)
    assert offset_of(ours, [Mark(P.RECEIVED, 11, 0.0), Mark(P.SENT, 27, 0.0)], sent, heard) == Offset(0, 3)
    assert offset_of(ours, [Mark(P.RECEIVED, 105, 0.0)], sent, heard) == Offset(-95, None)
    assert offset_of(ours, [Mark(P.SENT, 120, 0.0)], sent, heard) == Offset(-90, None)
    assert offset_of(ours, [], sent, heard) is None


def test_waiting_for_a_core_is_shown_beside_the_rest() -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (0, P.RUN_QUEUE, 7.0), (40, P.FIRST_TOKEN), (40, P.RUN_QUEUE, 7.030))
    scene.frontend((50, P.FINISHED), (50, P.RUN_QUEUE, 7.030))
    shown = scene.end(50)
    (waited,) = [span for span in shown.spans if span.phase == "run_queue"]
    assert (waited.start_ms, waited.end_ms, waited.value) == (0, pytest.approx(40), pytest.approx(30))
    assert shown.unattributed_ms == pytest.approx(40)


@given(st.randoms(use_true_random=False))
def test_any_marks_add_up(draw: random.Random) -> None:
    """Covered and unattributed time are the latency, whatever came over the wire."""
    scene = Scene()
    phases = list(Phase)
    for add in (scene.frontend, scene.decode, scene.prefill):
        add(*((draw.uniform(-50, 150), draw.choice(phases), draw.choice((0.0, 1.0, 5.0))) for _ in range(12)))
    scene.tell()
    shown = scene.end(100)
    covered = [(max(s.start_ms, 0.0), min(s.end_ms, 100.0)) for s in shown.spans if s.phase != "run_queue"]
    instants = sorted({0.0, 100.0, *itertools.chain.from_iterable((a, b) for a, b in covered if a < b)})
    total = sum(
        high - low
        for low, high in itertools.pairwise(instants)
        if any(a <= low and high <= b for a, b in covered if a < b)
    )
    assert shown.unattributed_ms == pytest.approx(100.0 - total, abs=1e-6)
    text_of(shown)


# -- what arrives -----------------------------------------------------------------------------------------------------


@given(st.binary(max_size=200))
def test_malformed_marks_cost_one_waterfall_and_nothing_else(field: bytes) -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (10, P.FINISHED))
    scene.trace.heard(0, field)
    assert scene.end(10).latency_ms == pytest.approx(10)


NO_NUMBERS = (math.nan, math.inf, -math.inf, 1e300, -1e300)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
@pytest.mark.parametrize("number", NO_NUMBERS)
def test_numbers_that_are_no_times_and_no_amounts_are_left_out(number: float, role: Role) -> None:
    """The answer of a client that asked for its waterfall must not fail by them, nor a list."""
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (1, P.ROUTED), (9, P.HEARD), (10, P.FINISHED))
    numbers = [each for phase in Phase for each in (phase, number, 1.0, phase, 1e6, number, number, 1e6, 1.0)]
    scene.trace.heard(0, encode(ProcessMarks("w", role, numbers)))
    shown = scene.end(10)
    assert all(math.isfinite(span.start_ms) and math.isfinite(span.end_ms) for span in shown.spans)
    assert msgspec.json.decode(msgspec.json.encode(shown), type=Waterfall) == shown


def test_marks_within_marks_within_marks() -> None:
    field = b""
    while len(field) < MAX_BYTES - 10:
        field = msgspec.msgpack.encode((b"", field))
    assert list(decode(field)) == []


def test_marks_that_are_too_large_or_too_many_are_dropped() -> None:
    big = encode(ProcessMarks("d", Role.DECODE, [1e300] * MAX_BYTES))
    assert list(decode(big)) == []
    trace = Trace(RunQueue(), "cmpl-1", "")
    trace.routed("d")
    trace.heard(0, big)
    assert trace.attempts[0].fields == []
    for number in range(100):
        attempt = trace.routed(f"w{number}")
        for byte in range(4):
            trace.heard(attempt, bytes([byte]) * MAX_BYTES)
    assert len(trace.attempts) == MAX_ATTEMPTS
    assert sum(len(field) for attempt in trace.attempts for _, field in attempt.fields) == trace.num_bytes
    assert trace.num_bytes <= MAX_TRACE_BYTES + MAX_BYTES
    longest = ProcessMarks("decode-0123456789", Role.DECODE, [1.5] * (MAX_NUMBERS + 20))
    assert list(decode(encode(longest))) == [longest], "what a worker can mark is never too large"


def test_late_tokens_are_marked_so_many_times_at_most() -> None:
    trace = Trace(RunQueue(), "cmpl-1", "")
    for number in range(1000):
        trace.late_token(number, 0.5)
        trace.migrated(number)
    assert 10 < len(trace.marks()) < 100


def test_a_terminal_does_not_obey_what_a_client_has_sent() -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED))
    scene.trace.model = "x\x1b[31m\n"
    scene.trace.end("no model \x07\x1b]0;title\x07")
    assert not {"\x1b", "\x07"} & set(text_of(waterfall(scene.trace, "f")))


def test_a_span_is_a_bar() -> None:
    scene = Scene()
    scene.frontend((0, P.RECEIVED), (50, P.TOKENISED), (100, P.ROUTED), (100, P.FINISHED))
    text = text_of(scene.end(100))
    (line,) = [line for line in text.splitlines() if " route " in line]
    assert line.count("█") == 24
    assert line.index("█") > 60
    assert "unattributed: 0.00 ms" in text


def test_the_drafts_of_an_answer_are_counted() -> None:
    own = (5, P.TAKEN_IN), (8, P.PREFILL_STARTED), (28, P.SAMPLED), (29, P.SENT)
    shown = _answered(Scene(), 30, *own, (97, P.DRAFTED, 18.0), (97, P.ACCEPTED, 5.0))
    assert shown.drafts == Drafts(18, 5)
    assert "speculation: 18 tokens drafted, 5 accepted" in text_of(shown)
    assert shown.spans == _answered(Scene(), 30, *own).spans
    assert _answered(Scene(), 30, *own).drafts is None
