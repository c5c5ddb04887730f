"""Everything that an engine is told, and what it then schedules, in a file: ``kvrelay worker --record-steps FILE``.

An engine is a function of the calls between its steps, of the times that its clock shows, of the placement's answers,
and of the tokens that are sampled. All four are recorded, so a playback schedules the same batches (``simulate.verify``
does that). The file is JSON lines: a Header, then a Call or a Step each, in order. It contains the prompts.

The recorded engine's clock stands still except at a call, at a step's begin and at the end of its execution; each of
these readings is in the file. An engine that is not recorded knows nothing of this module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, ParamSpec, TypeVar, cast

import msgspec

from kvrelay.config import EngineConfig
from kvrelay.core.clock import Clock, MonotonicClock
from kvrelay.core.handoff import HandoffId
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.core import EngineCore
from kvrelay.engine.request import PrefillMode, Request
from kvrelay.engine.step import Executor, ModelOutput, SchedulerOutput, StepOutput
from kvrelay.errors import ConfigError
from kvrelay.placement.base import Decision, Objectives, Situation
from kvrelay.placement.cost import CostPlacement

_log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 1.0
VERSION = 1
Count = Annotated[int, msgspec.Meta(ge=1, le=100_000_000)]
"""An entry is kept for each block, and a file may be damaged."""

P = ParamSpec("P")
R = TypeVar("R")


class Header(msgspec.Struct, frozen=True, tag="header", kw_only=True):
    """What the engine is built from. ``model``: its name, for people."""

    worker_id: str
    model: str
    config: EngineConfig
    num_blocks: Count
    block_size: Count
    max_model_len: Count
    vocab_size: Count
    eos_token_ids: tuple[int, ...]
    seed: int
    tail_tokens: int = 0
    version: int = VERSION


class RecordedRequest(msgspec.Struct, frozen=True):
    """A Request at its arrival; fields as there. ``is_placed_later``: its placement is decided at admission."""

    request_id: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    sampling: SamplingParams
    mode: PrefillMode
    num_load_tokens: int
    priority: int
    handoff_number: int
    tenant: str
    has_placement: bool
    is_placed_later: bool
    refuses_late: bool
    objectives: Objectives | None
    may_be_placed_anew: bool = False


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A method of EngineCore was called at ``at_s``, or raised (``is_refused``). ``answers``: of the placement."""

    at_s: float
    method: str
    request: RecordedRequest | None = None
    handoff_id: HandoffId | None = None
    arguments: tuple[str | int | float | bool | None, ...] = ()
    answers: tuple[float | bool | Decision, ...] = ()
    is_refused: bool = False


class Step(msgspec.Struct, frozen=True, tag="step"):
    """A step began at ``begin_s``; its execution ended at ``end_s``. ``batch``: request and tokens, in row order; empty
    if nothing was computed. ``token_ids`` were sampled."""

    begin_s: float
    end_s: float
    batch: tuple[tuple[str, int], ...] = ()
    token_ids: tuple[int, ...] = ()
    answers: tuple[float | bool | Decision, ...] = ()


Record = Header | Call | Step


class HeldClock:
    """Shows the time of the last ``refresh``."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._now_s = clock.now()

    def now(self) -> float:
        return self._now_s

    def refresh(self) -> float:
        """Read the real clock."""
        self._now_s = self._clock.now()
        return self._now_s


class Recorder:
    """Writes records to ``path``. Raises ConfigError if that is impossible. If it becomes so, the recording ends, and
    the worker goes on."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        try:
            self._file: IO[bytes] = path.open("wb")
        except OSError as exc:
            raise ConfigError(f"--record-steps {path}: {exc.strerror}", param="record_steps") from exc
        self.clock = HeldClock(clock)
        self.answers: list[float | bool | Decision] = []
        self.is_noting = False
        """Whether the engine is in a call or a step: ``has_work`` asks the placement as well, and changes nothing."""
        self.rows: tuple[tuple[str, int], ...] = ()
        self.token_ids: tuple[int, ...] = ()
        self._encoder = msgspec.json.Encoder()
        self._flushed_s = clock.now()

    def write(self, record: Record) -> None:
        """Append one line; it is in the file a second later at the latest, if records go on."""
        if self._file.closed:
            return
        try:
            self._file.write(self._encoder.encode(record) + b"\n")
            if self.clock.now() - self._flushed_s >= FLUSH_INTERVAL_S:
                self._flushed_s = self.clock.now()
                self._file.flush()
        except OSError as exc:
            self._cut_short(exc)

    def take_answers(self) -> tuple[float | bool | Decision, ...]:
        """The placement's answers in this call or step, which ends."""
        answers, self.answers, self.is_noting = tuple(self.answers), [], False
        return answers

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as exc:
            self._cut_short(exc)

    def _cut_short(self, reason: OSError) -> None:
        _log.error("--record-steps %s is cut short: %s", self._path, reason.strerror)
        with suppress(OSError):
            self._file.close()


class _RecordedExecutor:
    """An executor whose batches and tokens are noted."""

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self._executor, self._recorder = executor, recorder
        self._names: dict[int, str] = {}
        """Requests by slot."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        self._names.update((sequence.slot, sequence.request_id) for sequence in work.new_seqs)
        output = self._executor.execute(work)
        recorder = self._recorder
        recorder.clock.refresh()
        names, num_tokens = map(self._names.__getitem__, work.slots.tolist()), work.num_tokens.tolist()
        recorder.rows = tuple(zip(names, num_tokens))
        recorder.token_ids = tuple(output.token_ids)
        return output

    def shutdown(self) -> None:
        self._recorder.close()
        self._executor.shutdown()


class _RecordedPlacement:
    """A placement whose answers are noted."""

    def __init__(self, policy: CostPlacement, recorder: Recorder) -> None:
        self._policy, self._recorder = policy, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def _note(self, answer: R) -> R:
        if self._recorder.is_noting:
            self._recorder.answers.append(answer)  # type: ignore[arg-type]
        return answer

    @property
    def has_choice(self) -> bool:
        return self._note(self._policy.has_choice)

    def decide(self, situation: Situation) -> Decision:
        return self._note(self._policy.decide(situation))

    def soonest_s(self, *arguments: Any) -> float:
        return self._note(self._policy.soonest_s(*arguments))


class RecordedCore(EngineCore):
    """An EngineCore that writes down what happens to it. Arguments as there; ``model`` is the model's name.

    Raises ConfigError if the file cannot be written.
    """

    def __init__(
        self, executor: Executor, config: EngineConfig, path: Path, *, worker_id: str, model: str, seed: int = 0
    ) -> None:
        self._recorder = recorder = Recorder(path, MonotonicClock())
        recorded = cast(Executor, _RecordedExecutor(executor, recorder))
        super().__init__(recorded, config, recorder.clock, worker_id=worker_id, seed=seed)
        recorder.write(
            Header(
                worker_id=worker_id,
                model=model,
                config=config,
                num_blocks=executor.num_blocks,
                block_size=executor.kv_layout.block_size,
                max_model_len=executor.max_model_len,
                vocab_size=executor.vocab_size,
                eos_token_ids=tuple(executor.eos_token_ids),
                seed=seed,
                tail_tokens=executor.kv_layout.tail_tokens,
            )
        )

    def step(self, announce: Callable[[StepOutput], None] | None = None) -> StepOutput:
        recorder = self._recorder
        begin_s = recorder.clock.refresh()
        if not self.scheduler.has_work:
            return super().step(announce)
        recorder.rows, recorder.token_ids, recorder.is_noting = (), (), True
        output = super().step(announce)
        record = Step(begin_s, recorder.clock.now(), recorder.rows, recorder.token_ids, recorder.take_answers())
        recorder.write(record)
        return output

    def _recorded(
        self,
        method: Callable[P, R],
        call: Callable[[], R],
        *arguments: str | int | float | bool | None,
        request: RecordedRequest | None = None,
        handoff_id: HandoffId | None = None,
    ) -> R:
        at_s, is_refused = self._recorder.clock.refresh(), True
        self._recorder.is_noting = True
        try:
            result = call()
            is_refused = False
            return result
        finally:
            answers = self._recorder.take_answers()
            self._recorder.write(Call(at_s, method.__name__, request, handoff_id, arguments, answers, is_refused))

    def add_request(self, request: Request) -> None:
        noted = recorded_request(request)
        placement = request.placement
        if placement is not None:
            placement.policy = self._noting(placement.policy)
            placement.otherwise = self._noting(placement.otherwise)
        self._recorded(EngineCore.add_request, lambda: EngineCore.add_request(self, request), request=noted)

    def _noting(self, policy: CostPlacement | None) -> CostPlacement | None:
        return None if policy is None else cast(CostPlacement, _RecordedPlacement(policy, self._recorder))

    def abort(self, request_id: str) -> None:
        self._recorded(EngineCore.abort, lambda: EngineCore.abort(self, request_id), request_id)

    def resume_handoff(
        self, handoff_id: HandoffId, loan: int, token_id: int | None, logprobs: PositionLogprobs | None
    ) -> bool:
        def call() -> bool:
            return EngineCore.resume_handoff(self, handoff_id, loan, token_id, logprobs)

        return self._recorded(EngineCore.resume_handoff, call, loan, token_id, handoff_id=handoff_id)

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        def call() -> None:
            EngineCore.compute_handoff_here(self, handoff_id)

        self._recorded(EngineCore.compute_handoff_here, call, handoff_id=handoff_id)

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        def call() -> tuple[int, ...] | None:
            return EngineCore.lend_fresh(self, handoff_id, loan)

        return self._recorded(EngineCore.lend_fresh, call, loan, handoff_id=handoff_id)

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        def call() -> None:
            EngineCore.end_loan(self, handoff_id, loan)

        self._recorded(EngineCore.end_loan, call, loan, handoff_id=handoff_id)

    def keep_prefills_here(self) -> None:
        self._recorded(EngineCore.keep_prefills_here, lambda: EngineCore.keep_prefills_here(self))

    def set_exclusive_prefill(self, exclusive: bool) -> None:
        def call() -> None:
            EngineCore.set_exclusive_prefill(self, exclusive)

        self._recorded(EngineCore.set_exclusive_prefill, call, exclusive)

    def kv_loaded(self, request_id: str, ok: bool, num_blocks: int = 0) -> None:
        # A recorded engine has no tiers (``launch``), so loads arrive whole or not at all.
        self._recorded(EngineCore.kv_loaded, lambda: EngineCore.kv_loaded(self, request_id, ok), request_id, ok)

    def sending_finished(self, request_id: str) -> None:
        def call() -> None:
            EngineCore.sending_finished(self, request_id)

        self._recorded(EngineCore.sending_finished, call, request_id)

    def session_paused(self, request_id: str, kind: str, within_s: float = 0.0, is_over: bool = False) -> None:
        def call() -> None:
            EngineCore.session_paused(self, request_id, kind, within_s=within_s, is_over=is_over)

        self._recorded(EngineCore.session_paused, call, request_id, kind, within_s, is_over)

    def clear_cache(self) -> None:
        self._recorded(EngineCore.clear_cache, lambda: EngineCore.clear_cache(self))


def recorded_request(request: Request) -> RecordedRequest:
    """A request that has just been made, as a value."""
    placement = request.placement
    return RecordedRequest(
        request.request_id,
        request.token_ids[: request.num_prompt_tokens],
        request.token_ids[request.num_prompt_tokens :],
        request.sampling,
        request.mode,
        request.num_load_tokens,
        request.priority,
        request.handoff_number,
        request.tenant,
        placement is not None,
        placement is not None and placement.policy is not None,
        placement is not None and placement.refuses_late,
        None if placement is None else placement.objectives,
        placement is not None and placement.otherwise is not None,
    )
