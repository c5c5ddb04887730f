"""Where a backend's prefills run, by what its steps cost: decided late, measured when they come back, refused early."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvrelay.config import DisaggConfig, EngineConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.layout import paged_kv
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import CostSource, StepCost, StepPace, StepWork
from kvrelay.engine.admission.queue import MAX_CANDIDATES
from kvrelay.engine.contract import EngineFacts, require
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engines.hosted.backend import AnswerChunk
from kvrelay.engines.hosted.cache import PlacedPrefixes
from kvrelay.engines.hosted.costs import LOOK_S, STALE_S, STALE_TOKENS
from kvrelay.engines.hosted.engine import HostedEngine
from kvrelay.engines.hosted.step_log import StepLog
from kvrelay.errors import ObjectiveMissedError
from kvrelay.marks.phases import Phase
from kvrelay.placement.base import Objectives, PrefillLoad, PrefillPlace
from kvrelay.placement.cost import MIN_WINDOW, CostPlacement, PlacementState
from kvrelay.placement.threshold import DisaggPolicy

COST = StepCost(0.004, 0.005, 1e-4, 1e-12, 1e-12, 1e-12)
"""A long prompt takes a tenth of a millisecond for each token."""
SIZE = 16


class Calls:
    """In place of BackendCalls: what the backend was asked for."""

    def __init__(self) -> None:
        self.begun: list[str] = []

    def start(self, request_id: str, *_: object) -> None:
        self.begun.append(request_id)

    def cancel(self, request_id: str) -> None:
        """Nothing is under way."""


class Side:
    """A decode worker's engine, and the prefill side as it knows it."""

    def __init__(self, *, early_reject: bool = False) -> None:
        self.clock = ManualClock()
        self.calls, self.log = Calls(), StepLog.create()
        self.prefills = PrefillLoad(1, 0)
        self.places: list[PrefillPlace] = []
        self.early_reject = early_reject
        self.policy = CostPlacement(DisaggPolicy(DisaggConfig()), lambda: self.prefills, self.places.append, self.clock)
        facts = EngineFacts(paged_kv(1, 1, SIZE, 1, "int32"), 1000, 100_000, 1000, "", moves_kv=True)
        backend: Any = SimpleNamespace(
            name="vLLM",
            samples_ids=True,
            tells_moments=True,
            scores_prompts=True,
            check=lambda sampling: None,
            stream=lambda *_: None,
            prefill=lambda *_: None,
        )
        self.engine = HostedEngine(
            facts,
            EngineConfig(max_num_seqs=1024),
            backend,
            self.calls,  # type: ignore[arg-type]
            PlacedPrefixes(SIZE, 1000),
            self.clock,
            worker_id="d",
            eos_token_ids=(),
            teller=self.log,
            sets_pace=True,
        )

    def measure(self) -> None:
        """The costs of both ways, until they are as good as known."""
        writer = StepLog(self.log.path)
        for number in range(300):
            for work in (StepWork(0, 0, number % 5 + 1, 100), StepWork(100 * (number % 9 + 1), 0, 0, 0)):
                writer.write_step(
                    COST.step_seconds(work), work.num_prefill_tokens, 0, work.num_decodes, work.num_context_tokens
                )
        self.engine.look()
        for number in range(300):
            tokens, ahead = 100 * (number % 9 + 1), 500 * (number % 4)
            prefill_s = COST.prefill_seconds(tokens)
            self.policy.model.add(tokens, ahead, 0.010 + 1e-4 * ahead + 1e-6 * tokens + prefill_s, prefill_s)

    def busy(self, num_chats: int = 60) -> None:
        """With answers beside which no long prompt is computed here while another way is open, or will be."""
        self.measure()
        self.prefills = PrefillLoad(0, 0)
        for number in range(num_chats):
            self.add(f"chat-{number}", 20, Objectives(60.0, 0.02))
            self.token(f"chat-{number}")
        self.prefills = PrefillLoad(1, 0)

    def add(self, name: str, length: int, objectives: Objectives | None = None) -> Request:
        state = PlacementState(self.policy, objectives or Objectives(0.5, 0.05), refuses_late=self.early_reject)
        first = sum(map(ord, name)) % 900
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        tokens = [(first + number) % 1000 for number in range(length)]
        request = Request(name, tokens, sampling, placement=state, listener=lambda moved, status: None)
        self.engine.add_request(request)
        return request

    def token(self, name: str) -> None:
        self.engine.received(name, AnswerChunk((7,)))


@pytest.fixture
def side() -> Side:
    return Side()


def test_a_prompt_goes_where_it_costs_less(side: Side) -> None:
    side.measure()
    chats = [side.add(f"chat-{number}", 20) for number in range(3)]
    assert [chat.mode for chat in chats] == [PrefillMode.LOCAL] * 3
    assert side.calls.begun == ["chat-0", "chat-1", "chat-2"]
    for chat in chats:
        side.token(chat.request_id)
    long = side.add("long", 8000)
    assert long.mode is PrefillMode.REMOTE, "300 ms of it would be beside three answers"
    output = side.engine.take_output()
    (prefill,) = output.remote_prefills
    assert prefill.request_id == "long"
    assert side.places == [PrefillPlace.LOCAL_CHEAPER] * 3 + [PrefillPlace.REMOTE]
    assert long.placement is not None
    assert long.placement.decision is not None
    assert 0.0 < long.placement.decision.remote_s < 2.0
    marked = {Phase(int(phase)): value for name, (phase, _, value) in output.marks if name == "long"}
    assert marked[Phase.LOCAL_ESTIMATE] == long.placement.decision.local_s
    assert marked[Phase.REMOTE_ESTIMATE] == long.placement.decision.remote_s


def test_without_a_prefill_worker_every_prompt_is_computed_here(side: Side) -> None:
    side.prefills = PrefillLoad(0, 0)
    assert side.add("long", 8000).mode is PrefillMode.LOCAL
    assert side.places == [PrefillPlace.LOCAL_NO_PREFILL_WORKER]


def test_a_prompt_waits_while_the_cheaper_way_is_closed_and_begins_when_it_opens(side: Side) -> None:
    side.busy()
    sent = [side.add(f"sent-{number}", 6000, Objectives(60.0, 0.02)) for number in range(MIN_WINDOW)]
    assert {request.mode for request in sent} == {PrefillMode.REMOTE}
    line = [side.add(f"line-{number}", 6000, Objectives(60.0, 0.02)) for number in range(2)]
    assert {request.mode for request in line} == {PrefillMode.LOCAL}, "neither way is taken"
    assert not set(side.calls.begun) & {"line-0", "line-1"}
    assert side.engine.metrics().num_prefill_tokens == 12_000
    output = side.engine.take_output()
    assert len(output.remote_prefills) == MIN_WINDOW
    assert require(side.engine.moves).fetch_handoff(output.remote_prefills[0].handoff_id, b"{}")
    side.token("sent-0")
    assert [prefill.request_id for prefill in side.engine.take_output().remote_prefills] == ["line-0"]
    side.engine.abort("line-1")
    assert side.engine.metrics().num_prefill_tokens == 0
    side.prefills = PrefillLoad(0, 0)
    assert side.engine.take_output().remote_prefills == []


def test_what_waits_for_a_way_is_computed_here_when_the_prefill_workers_are_gone(side: Side) -> None:
    side.busy(300)
    line = [f"line-{number}" for number in range(2 * MAX_CANDIDATES)]
    for name in (*(f"sent-{number}" for number in range(MIN_WINDOW)), *line):
        side.add(name, 6000, Objectives(60.0, 0.02))
    assert not set(side.calls.begun) & set(line)
    side.prefills = PrefillLoad(0, 0)
    side.engine.keep_prefills_here()
    assert side.calls.begun[-len(line) :] == line


def test_a_remote_prefill_is_measured_without_what_its_worker_computed(side: Side) -> None:
    side.measure()
    before = side.policy.model.num_samples
    for number in range(4):
        side.add(f"chat-{number}", 20)
        side.token(f"chat-{number}")
    side.add("long", 6000, Objectives(60.0, 0.02))
    (prefill,) = side.engine.take_output().remote_prefills
    side.clock.advance(0.7)
    require(side.engine.moves).fetch_handoff(prefill.handoff_id, b"{}")
    side.token("long")
    assert side.policy.model.num_samples == before, "how long it was computed is not known yet"
    # The ledger tells it with the end of the fetch.
    side.policy.prefill_took("long", 0.6)
    require(side.engine.moves).handoff_told("long")
    assert side.policy.model.num_samples == before + 1
    require(side.engine.moves).handoff_told("long")
    require(side.engine.moves).handoff_told("unknown")
    assert side.policy.model.num_samples == before + 1
    assert side.policy.model.cost.seconds(6000, 0) == pytest.approx(0.7, rel=0.2)


@pytest.mark.parametrize("end", ["aborted", "computed here"])
def test_a_remote_prefill_that_does_not_come_back_is_not_under_way_any_more(side: Side, end: str) -> None:
    side.busy()
    for number in range(MIN_WINDOW):
        side.add(f"long-{number}", 6000, Objectives(60.0, 0.02))
    prefills = side.engine.take_output().remote_prefills
    if end == "aborted":
        for prefill in prefills:
            side.engine.abort(prefill.request_id)
    else:
        for prefill in prefills:
            side.engine.compute_handoff_here(prefill.handoff_id)
            side.token(prefill.request_id)
    assert side.add("next", 6000, Objectives(60.0, 0.02)).mode is PrefillMode.REMOTE, "the window is open"


def test_a_first_token_that_is_late_anyway_is_refused_at_once() -> None:
    side = Side(early_reject=True)
    side.measure()
    side.prefills = PrefillLoad(0, 0)
    side.add("first", 4000)
    with pytest.raises(ObjectiveMissedError, match=r"at best; the objective is 0.5 s"):
        side.add("late", 3000)
    assert side.calls.begun == ["first"]
    side.token("first")
    side.add("again", 3000)


def test_stale_costs_leave_it_to_the_thresholds(side: Side) -> None:
    side.measure()
    side.add("chat", 20)
    side.clock.advance(STALE_S + 1)
    for _ in range(STALE_TOKENS):
        side.engine.received("none", AnswerChunk((7,)))
    for _ in range(8):
        side.token("chat")
    for number in range(STALE_TOKENS // 8):
        side.add(f"more-{number}", 20)
        for _ in range(8):
            side.token(f"more-{number}")
    side.engine.look()
    load = side.engine.metrics()
    assert (load.step_cost, load.step_cost_source) == (None, CostSource.STALE)
    before = side.policy.num_fallbacks
    limit = DisaggConfig().max_local_prefill_length
    assert side.add("short", limit).mode is PrefillMode.LOCAL
    assert side.add("long", limit + 1).mode is PrefillMode.REMOTE
    assert side.policy.num_fallbacks == before + 2


def test_objectives_of_all_requests_here_are_the_pace(side: Side) -> None:
    vllm = StepLog(side.log.path)

    def limits() -> tuple[float, float]:
        side.clock.advance(LOOK_S)
        side.engine.look()
        return vllm.read_pace().limit_s, vllm.read_pace().ttft_s

    side.add("a", 20, Objectives(0.5, 0.05))
    side.add("b", 20, Objectives(0.4, 0.02))
    strict_s, ttft_s = limits()
    assert 0.0 < strict_s < 0.02
    assert ttft_s == 0.4
    side.engine.abort("b")
    assert limits() == (pytest.approx(2.5 * strict_s), 0.5)
    side.token("a")
    assert limits() == (pytest.approx(2.5 * strict_s), 0.0)
    for _ in range(7):
        side.token("a")
    assert limits() == (0.0, 0.0)


def test_costs_and_steps_are_published(side: Side) -> None:
    side.measure()
    side.add("chat", 20)
    side.add("other", 300)
    side.token("chat")
    load, stats = side.engine.metrics(), side.engine.stats()
    assert (load.num_running, load.num_prefill_tokens) == (1, 300)
    assert load == stats.load
    assert load.step_cost is not None
    assert load.step_cost.prefill_token_s == pytest.approx(COST.prefill_token_s, rel=0.05)
    assert (stats.tokens.num_steps, stats.times.step.count) == (600, 600)
    assert msgspec.json.decode(msgspec.json.encode(load), type=type(load)) == load
    assert isinstance(StepLog(side.log.path).read_pace(), StepPace)
