"""Code that runs in vLLM's engine process: a scheduler that tells the worker of each step, and cuts prompts by the
objectives of running answers.

``Scheduler`` is made when vLLM asks for it by name: a subclass of the scheduler that vLLM would have chosen, which the
worker has named in the environment. It changes nothing of vLLM's files, and decides nothing but how many tokens a step
may have and in which order those that run get theirs:

    schedule              pace ──> the step's token budget, the share of one prompt; decodes first, then short prompts
                          what was scheduled ──> its composition
    update_from_output    the time since the step before ──> the log

If a part of this fails, vLLM goes on without: the log says why, and no exception leaves a hook.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Collection, Sequence
from importlib import import_module
from itertools import chain, islice
from typing import Any, NamedTuple

import msgspec

from kvrelay.core.step_cost import MIN_CHUNK_TOKENS, prefill_pairs
from kvrelay.engine.scheduled_batch import OLDEST_SHARE
from kvrelay.engines.hosted.step_log import StepLog

_log = logging.getLogger(__name__)

SCHEDULER = "KVRELAY_SCHEDULER"
"""The environment variable with vLLM's own scheduler class, by its full name."""
STEP_LOG = "KVRELAY_STEP_LOG"
"""The environment variable with the path of the step log."""
NAME = f"{__name__}.Scheduler"
"""For ``scheduler_cls``."""
METHODS = ("schedule", "update_from_output", "get_request_counts", "has_unfinished_requests")
STATE = ("requests", "running")
LIMITS = ("max_num_scheduled_tokens", "scheduler_config", "waiting")
"""Attributes of a scheduler: without the first two groups nothing is recorded, without the last no prompt is cut."""
MAX_IN_FLIGHT = 64
MOST_WAITING = 16
"""So many of the prompts that wait are looked at: a step must not cost more with a longer line."""


def missing(found: object, names: Collection[str]) -> str:
    """The names that ``found`` lacks, for a message; empty if it has all."""
    return ", ".join(name for name in names if not hasattr(found, name))


def share_of_prompt(budget: int, prompts: Sequence[int]) -> int:
    """The most tokens that one prompt may have of a step with ``budget``, so that each gets what it needs or an equal
    share, and none less than 1 / OLDEST_SHARE. ``prompts``: tokens to compute of each."""
    left = budget
    for number, num_tokens in enumerate(sorted(prompts)):
        share = left // (len(prompts) - number)
        if num_tokens >= share:
            return max(share, budget // OLDEST_SHARE, 1)
        left -= num_tokens
    return budget


def num_accepted_tokens(scheduled: Any, sampled: Any) -> int:
    """Tokens of a step beyond one for each sequence. ``scheduled`` and ``sampled``: vLLM's outputs of its scheduler and
    of its model runner, which has no tokens in all stages of a pipeline but the last."""
    if not scheduled.scheduled_spec_decode_tokens or not sampled.sampled_token_ids:
        return 0
    rows = (sampled.req_id_to_index.get(name) for name in scheduled.scheduled_spec_decode_tokens)
    return sum(max(len(sampled.sampled_token_ids[row]) - 1, 0) for row in rows if row is not None)


class _Scheduled(NamedTuple):
    """A step that was scheduled: vLLM's output for it, when scheduling began, and the counts of a StepWork but for the
    accepted tokens, which are not known yet."""

    output: Any
    began_s: float
    work: tuple[int, int, int, int]


class StepRecorder:
    """The hooks of one scheduler of vLLM's. Raises nothing."""

    def __init__(self, scheduler: Any, log: StepLog) -> None:
        self._log = log
        self._in_flight: deque[_Scheduled] = deque(maxlen=MAX_IN_FLIGHT)
        self._last_s = 0.0
        self._was_idle = True
        self._has_prompts = True
        """Whether the last step has left a part of a prompt to compute."""
        self._decode_tokens = 1 + getattr(scheduler, "num_spec_tokens", 0)
        self._is_limited = False
        self._is_on = True
        self._limits = _Limits.of(scheduler)
        if lacking := missing(scheduler, STATE):
            self._stop(scheduler, f"vLLM's scheduler has no {lacking}: its steps are not recorded")
        else:
            log.write_state(is_on=True, reason=self._limits.reason)

    def before_schedule(self, scheduler: Any) -> float:
        """Returns the time."""
        now_s = time.perf_counter()
        if self._is_on and self._limits.are_known:
            try:
                self._limit(scheduler)
            except Exception as exc:  # noqa: BLE001 - vLLM must go on
                self._stop(scheduler, f"the step's budget could not be set: {exc!r}")
        return now_s

    def after_schedule(self, scheduler: Any, output: Any, began_s: float) -> None:
        if not self._is_on:
            return
        try:
            if output.total_num_scheduled_tokens:
                self._in_flight.append(_Scheduled(output, began_s, self._work_of(scheduler, output)))
        except Exception as exc:  # noqa: BLE001 - vLLM must go on
            self._stop(scheduler, f"the step's composition could not be read: {exc!r}")

    def before_update(self, scheduler: Any, output: Any, sampled: Any) -> None:
        """The step of ``output`` has finished, and the model runner has ``sampled``. Steps overlap with asynchronous
        scheduling, so its time counts from the end of the step before, unless there was none."""
        if not self._is_on:
            return
        now_s = time.perf_counter()
        try:
            while self._in_flight and output.total_num_scheduled_tokens:
                step = self._in_flight.popleft()
                if step.output is output:
                    since_s = step.began_s if self._was_idle else self._last_s
                    self._log.write_step(now_s - since_s, *step.work, num_accepted_tokens(output, sampled))
                    break
        except Exception as exc:  # noqa: BLE001 - vLLM must go on
            self._stop(scheduler, f"the step could not be recorded: {exc!r}")
        self._last_s = now_s

    def after_update(self, scheduler: Any) -> None:
        self._was_idle = self._is_on and not self._in_flight and not scheduler.has_unfinished_requests()

    def _work_of(self, scheduler: Any, output: Any) -> tuple[int, int, int, int]:
        cached = output.scheduled_cached_reqs
        before, num_tokens = cached.num_computed_tokens, output.total_num_scheduled_tokens
        self._has_prompts = False
        if num_tokens == len(before) and not output.scheduled_new_reqs:
            # One token each. The usual step must not cost more with more sequences.
            return 0, 0, num_tokens, sum(before) + num_tokens
        tokens = pairs = decodes = context = 0
        rows = [*zip(cached.req_ids, before)]
        rows += [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        for name, num_before in rows:
            count = output.num_scheduled_tokens[name]
            request = scheduler.requests[name]
            if count <= self._decode_tokens and num_before >= max(request.num_prompt_tokens - 1, 1):
                decodes += 1
                context += num_before + count
            else:
                tokens += count
                pairs += prefill_pairs(count, num_before)
                self._has_prompts |= num_before + count < request.num_tokens
        return tokens, pairs, decodes, context

    # -- the budget ---------------------------------------------------------------------------------------------------

    def _limit(self, scheduler: Any) -> None:
        limits, pace = self._limits, self._log.read_pace()
        _, num_waiting = scheduler.get_request_counts()
        # Some wait for something else than their turn, for example for KV.
        num_deferred = len(getattr(scheduler, "deferred_waiting", ()))
        num_waiting = max(num_waiting - num_deferred, 0)
        if not (num_waiting or self._has_prompts) or not (pace.limit_s or pace.ttft_s):
            self._unlimit(scheduler)
            return
        decodes, prompts, num_context = [], [], 0
        for request in scheduler.running:
            left = request.num_tokens_with_spec + request.num_output_placeholders - request.num_computed_tokens
            if left <= self._decode_tokens:
                decodes.append(request)
                num_context += request.num_computed_tokens
            else:
                prompts.append((request.priority, left, request))
        if prompts:
            # vLLM goes through them in order, and a prompt takes what decodes after it would need.
            prompts.sort(key=lambda prompt: prompt[:2])
            scheduler.running[:] = decodes + [request for _, _, request in prompts]
        num_decode_tokens = self._decode_tokens * len(decodes)
        most = max(limits.num_tokens - num_decode_tokens, 1)
        waiting = waiting_tokens(scheduler)
        lefts = [left for _, left, _ in prompts] + waiting
        budget = pace.prefill_budget(
            most,
            num_decodes=len(decodes),
            num_context=num_context,
            prompts=[(left, request.num_computed_tokens) for _, left, request in prompts],
        )
        budget = max(budget, limits.smallest_chunk)
        if budget >= most:
            self._unlimit(scheduler)
            return
        self._is_limited = True
        # vLLM looks whether KV has come only if tokens are left. Such a request needs one, padded with drafts.
        num_deferred_tokens = self._decode_tokens * num_deferred
        scheduler.max_num_scheduled_tokens = min(num_decode_tokens + budget + num_deferred_tokens, limits.num_tokens)
        share = max(share_of_prompt(budget, lefts), limits.smallest_chunk)
        if not waiting:
            # All are in our order: one ends before the next gets more than a quarter.
            share = max(share, budget - budget // OLDEST_SHARE)
        scheduler.scheduler_config.long_prefill_token_threshold = min(share, limits.long_prompt or share)

    def _unlimit(self, scheduler: Any) -> None:
        if self._is_limited:
            self._is_limited = False
            scheduler.max_num_scheduled_tokens = self._limits.num_tokens
            scheduler.scheduler_config.long_prefill_token_threshold = self._limits.long_prompt

    def _stop(self, scheduler: Any, reason: str) -> None:
        """vLLM goes on as if there were no recorder."""
        self._is_on = False
        self._in_flight.clear()
        self._unlimit(scheduler)
        self._log.write_state(is_on=False, reason=reason)


def waiting_tokens(scheduler: Any) -> list[int]:
    """To compute of each prompt that may begin next, as if no prefix of it were cached."""
    waiting = chain(getattr(scheduler, "kv_holding_waiting", ()), scheduler.waiting)
    deferred = getattr(scheduler, "deferred_waiting", ())
    ready = (request for request in waiting if request not in deferred)
    return [max(request.num_tokens - request.num_computed_tokens, 1) for request in islice(ready, MOST_WAITING)]


class _Limits(msgspec.Struct, frozen=True):
    """vLLM's own limits of a step. ``reason``: why prompts are not cut; empty: they are."""

    num_tokens: int = 0
    long_prompt: int = 0
    """Tokens of one prompt in a step, beside others; 0: any number."""
    smallest_chunk: int = MIN_CHUNK_TOKENS
    reason: str = ""

    @property
    def are_known(self) -> bool:
        return not self.reason

    @classmethod
    def of(cls, scheduler: Any) -> _Limits:
        if lacking := missing(scheduler, LIMITS) or missing(
            scheduler.scheduler_config, ("long_prefill_token_threshold", "enable_chunked_prefill")
        ):
            return cls(reason=f"prompts are not cut by objectives: vLLM's scheduler has no {lacking}")
        config = scheduler.scheduler_config
        if not config.enable_chunked_prefill:
            return cls(reason="prompts are not cut by objectives: enable_chunked_prefill is off")
        # vLLM cuts recurrent states at blocks only.
        is_aligned = getattr(scheduler, "need_mamba_block_aligned_split", False)
        smallest = max(MIN_CHUNK_TOKENS, scheduler.block_size) if is_aligned else MIN_CHUNK_TOKENS
        return cls(scheduler.max_num_scheduled_tokens, config.long_prefill_token_threshold, smallest)


def recording(base: Any, log: StepLog) -> Any:
    """A subclass of ``base``, a scheduler class of vLLM's, that writes its steps to ``log``."""

    class RecordingScheduler(base):  # type: ignore[misc]  # it is known when vLLM runs
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._kvrelay_recorder = StepRecorder(self, log)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:
            began_s = self._kvrelay_recorder.before_schedule(self)
            output = super().schedule(*args, **kwargs)
            self._kvrelay_recorder.after_schedule(self, output, began_s)
            return output

        def update_from_output(self, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._kvrelay_recorder.before_update(self, scheduler_output, model_runner_output)
            outputs = super().update_from_output(scheduler_output, model_runner_output, *args, **kwargs)
            self._kvrelay_recorder.after_update(self)
            return outputs

    return RecordingScheduler


def class_by_name(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    return getattr(import_module(module), attribute)


def __getattr__(name: str) -> Any:
    """``Scheduler``, as the environment has it. Without a step log that can be mapped it is vLLM's own."""
    if name != "Scheduler":
        raise AttributeError(name)
    base = class_by_name(os.environ[SCHEDULER])
    try:
        return recording(base, StepLog(os.environ[STEP_LOG]))
    except (OSError, ValueError) as exc:
        _log.warning("vLLM's steps are not recorded: the step log cannot be mapped (%s)", exc)
        return base
