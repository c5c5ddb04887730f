"""Plays a recording of an engine's steps back: a fresh EngineCore gets the same calls, times and tokens, and must
schedule the same batches.

What differs is the scheduler's error, apart from any model of time: there should be none.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from kvrelay.bench.formats import opened
from kvrelay.core.clock import ManualClock
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.layout import paged_kv
from kvrelay.core.step_cost import StepWork
from kvrelay.engine.core import EngineCore
from kvrelay.engine.recording import VERSION, Call, Header, Record, RecordedRequest, Step
from kvrelay.engine.request import Request
from kvrelay.engine.step import Executor, ModelOutput, SchedulerOutput, StepOutput
from kvrelay.errors import InvalidInputError, KvrelayError
from kvrelay.placement.base import Decision
from kvrelay.placement.cost import CostPlacement, PlacementState
from kvrelay.simulate.arrival import RecordedArrival
from kvrelay.simulate.result import RequestResult


class _DifferenceError(Exception):
    """The playback cannot go on: the engine asks for what the recording does not have."""


class Playback(msgspec.Struct):
    """What came of one. ``requests``: those that arrived here, with the recorded times of their tokens at the engine.
    ``works``: each computed batch with its recorded time. ``gaps_s``: from one step's end to the next one's begin."""

    header: Header
    num_steps: int = 0
    difference: str = ""
    """The first batch that is not the recorded one; empty: all are."""
    requests: dict[str, RequestResult] = {}
    arrivals: list[tuple[float, RecordedRequest]] = []
    has_handoffs: bool = False
    works: list[tuple[StepWork, float]] = []
    gaps_s: list[float] = []

    def load(self) -> list[RecordedArrival]:
        """The requests that arrived here, the first at 0 s. An answer is as long as it was when it ended, was
        cancelled, or the recording ended."""
        first_s = self.arrivals[0][0] if self.arrivals else 0.0
        return [
            RecordedArrival(
                time_s=at_s - first_s,
                prompt_tokens=len(request.prompt_token_ids) + len(request.output_token_ids),
                answer_tokens=max(len(self.requests[request.request_id].tokens_s), 1),
                priority=request.priority,
                token_ids=tuple(request.prompt_token_ids + request.output_token_ids),
            )
            for at_s, request in self.arrivals
        ]


class _PlaybackExecutor:
    """Takes the recorded time and samples the recorded tokens. A recorded engine has no holding area."""

    num_holding_blocks = num_spill_blocks = 0

    def __init__(self, header: Header, clock: ManualClock) -> None:
        self.num_blocks, self.vocab_size = header.num_blocks, header.vocab_size
        self.kv_layout = paged_kv(1, 1, header.block_size, 1, "int32", tail_tokens=header.tail_tokens)
        self.max_model_len, self.eos_token_ids = header.max_model_len, header.eos_token_ids
        self.rows: tuple[tuple[str, int], ...] = ()
        self.step = Step(0.0, 0.0)
        self.works: list[tuple[StepWork, float]] = []
        self.core: EngineCore | None = None
        self._clock = clock
        self._names: dict[int, str] = {}

    def check(self) -> None:
        """It always runs."""

    def copy_blocks(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """There is no KV."""

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        self._names.update((sequence.slot, sequence.request_id) for sequence in work.new_seqs)
        self.rows = tuple((self._names[slot], count) for slot, count in zip(work.slots.tolist(), work.num_tokens))
        if self.rows != self.step.batch:
            raise _DifferenceError
        self._clock.move_to(self.step.end_s)
        if self.rows and self.core is not None:
            self.works.append((self.core.scheduler.step_work(), self.step.end_s - self.step.begin_s))
        return ModelOutput(list(self.step.token_ids))


class _PlaybackPlacement:
    """Gives the recorded answers, in their order."""

    def __init__(self) -> None:
        self.answers: deque[float | bool | Decision] = deque()

    def _answer(self) -> Any:
        if not self.answers:
            raise _DifferenceError
        return self.answers.popleft()

    @property
    def has_choice(self) -> bool:
        return bool(self._answer())

    def decide(self, _: object) -> Decision:
        return cast(Decision, self._answer())

    def soonest_s(self, *_: object) -> float:
        return float(self._answer())

    def placed(self, _: Decision) -> None:
        """The recorded one has counted it."""

    def came_back(self, *_: object) -> None:
        """The recorded one has learnt from it."""


MAX_SPAN_S = 30 * 86_400.0
"""What a recording covers; a simulation passes through all of it."""


def read_recording(path: Path) -> Iterator[Record]:
    """The records, the header first. A last line that was cut off is left out. Raises InvalidInputError."""
    decoder = msgspec.json.Decoder(Record)
    first_s: float | None = None
    with opened(path) as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                record = decoder.decode(line)
            except UNREADABLE as exc:
                raise InvalidInputError(f"recording {path}, line {number}: {exc}") from exc
            if (number == 1) is not isinstance(record, Header):
                raise InvalidInputError(f"recording {path}, line {number}: the first line, and no other, is the header")
            if isinstance(record, Header) and record.version != VERSION:
                raise InvalidInputError(f"recording {path}: version {record.version} is unknown; this release reads 1")
            if not isinstance(record, Header):
                times = (record.at_s,) if isinstance(record, Call) else (record.begin_s, record.end_s)
                first_s = times[0] if first_s is None else first_s
                if max(abs(time_s - first_s) for time_s in times) > MAX_SPAN_S:
                    raise InvalidInputError(f"recording {path}, line {number}: its time is a month from the first one")
            yield record


def play_back(path: Path) -> Playback:
    """Play a recording back until its end or its first difference. Raises InvalidInputError."""
    records = read_recording(path)
    header = next(records, None)
    if not isinstance(header, Header):
        raise InvalidInputError(f"recording {path} is empty")
    player = _Player(header)
    for record in records:
        if isinstance(record, Call):
            player.call(record)
        elif isinstance(record, Step) and not player.step(record):
            break
    player.result.works = player.executor.works
    return player.result


class _Player:
    def __init__(self, header: Header) -> None:
        self.result = Playback(header)
        self.clock = ManualClock()
        self.executor = _PlaybackExecutor(header, self.clock)
        self._placement = _PlaybackPlacement()
        executor = cast(Executor, self.executor)
        self.core = EngineCore(executor, header.config, self.clock, worker_id=header.worker_id, seed=header.seed)
        self.executor.core = self.core
        self._ended_s: float | None = None

    def call(self, call: Call) -> None:
        """Call the engine as it was called."""
        self.clock.move_to(call.at_s)
        self._placement.answers.extend(call.answers)
        arguments: list[Any] = [] if call.handoff_id is None else [call.handoff_id]
        arguments += call.arguments
        if call.request is not None:
            arguments = [self._request(call.at_s, call.request, is_refused=call.is_refused)]
        elif call.method == "resume_handoff":
            arguments.append(None)
        self.result.has_handoffs |= call.handoff_id is not None or call.method in ("kv_loaded", "sending_finished")
        try:
            getattr(self.core, call.method)(*arguments)
        except KvrelayError:
            if not call.is_refused:
                raise

    def _request(self, at_s: float, request: RecordedRequest, *, is_refused: bool) -> Request:
        if not is_refused:
            self.result.arrivals.append((at_s, request))
            num_prompt = len(request.prompt_token_ids)
            self.result.requests[request.request_id] = RequestResult(len(self.result.requests), at_s, num_prompt)
        placement = PlacementState(
            policy=cast(CostPlacement, self._placement) if request.is_placed_later else None,
            otherwise=cast(CostPlacement, self._placement) if request.may_be_placed_anew else None,
            objectives=request.objectives,
            refuses_late=request.refuses_late,
        )
        return Request(
            request.request_id,
            request.prompt_token_ids,
            request.sampling,
            output_token_ids=request.output_token_ids,
            mode=request.mode,
            num_load_tokens=request.num_load_tokens,
            priority=request.priority,
            handoff_number=request.handoff_number,
            tenant=request.tenant,
            placement=placement if request.has_placement else None,
        )

    def step(self, step: Step) -> bool:
        """Run the step; False if its batch is another one."""
        self.clock.move_to(step.begin_s)
        self._placement.answers.extend(step.answers)
        self.executor.step, self.executor.rows = step, ()
        try:
            output = self.core.step(lambda early: self._note(early.outputs, step.begin_s))
        except _DifferenceError:
            self.executor.rows = ()  # the placement was asked for more than was recorded
            output = StepOutput()
            self._placement.answers.append(False)
        if self.executor.rows != step.batch or self._placement.answers:
            self.result.difference = (
                f"step {self.result.num_steps}: recorded {_text(step.batch)}, played back {_text(self.executor.rows)}"
            )
            return False
        self.result.num_steps += 1
        if self._ended_s is not None and step.begin_s >= self._ended_s:
            self.result.gaps_s.append(step.begin_s - self._ended_s)
        self._ended_s = step.end_s if self.core.scheduler.num_admitted else None
        self._note(output.outputs, step.end_s)
        return True

    def _note(self, outputs: list[Any], at_s: float) -> None:
        for output in outputs:
            request = self.result.requests.get(output.request_id)
            if request is not None:
                request.tokens_s.extend(array("d", [at_s] * len(output.token_ids)))
                request.is_done |= output.finish_reason is not None and bool(request.tokens_s)


def _text(batch: tuple[tuple[str, int], ...]) -> str:
    rows = ", ".join(f"{name}:{count}" for name, count in batch[:4])
    return f"[{rows}{', ...' if len(batch) > 4 else ''}] ({len(batch)} rows)"
