"""A scheduler with the parts of vLLM's that are used: requests get tokens in the order in which they run, then in the
order in which they came, under a budget for the step and one for a prompt."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any


class FakeRequest:
    num_output_placeholders = 0
    num_drafts = 0
    """Tokens that are drafted for its next step."""

    def __init__(self, name: str, num_prompt_tokens: int, priority: int = 0, num_computed_tokens: int = 0) -> None:
        self.name, self.priority = name, priority
        self.num_prompt_tokens = self.num_tokens = num_prompt_tokens
        self.num_computed_tokens = num_computed_tokens

    @property
    def num_tokens_with_spec(self) -> int:
        return self.num_tokens + self.num_drafts


class FakeScheduler:
    """``max_num_scheduled_tokens`` and the share of a long prompt are read at each step, as vLLM reads them."""

    num_spec_tokens = 0
    block_size = 32

    def __init__(self, num_tokens: int = 1000, *, enable_chunked_prefill: bool = True) -> None:
        self.max_num_scheduled_tokens = num_tokens
        self.scheduler_config = SimpleNamespace(
            long_prefill_token_threshold=0, enable_chunked_prefill=enable_chunked_prefill
        )
        self.requests: dict[str, FakeRequest] = {}
        self.running: list[FakeRequest] = []
        self.waiting: deque[FakeRequest] = deque()
        self.deferred_waiting: set[FakeRequest] = set()
        self.loaded: set[FakeRequest] = set()
        """Deferred ones whose KV has come. It is noticed if the budget of a step has tokens left."""
        self.num_updates = 0

    def add(self, *requests: FakeRequest) -> None:
        for request in requests:
            self.requests[request.name] = request
            self.waiting.append(request)

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def has_unfinished_requests(self) -> bool:
        return bool(self.running or self.waiting)

    def schedule(self, throttle_prefills: bool = False) -> Any:
        left, share = self.max_num_scheduled_tokens, self.scheduler_config.long_prefill_token_threshold
        share = share if len(self.running) + len(self.waiting) > 1 else 0
        counts: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        cached = SimpleNamespace(req_ids=[], num_computed_tokens=[])
        new: list[Any] = []
        ready = [each for each in self.waiting if each not in self.deferred_waiting or each in self.loaded]
        for request in [*self.running, *ready]:
            if not left:
                break
            num_tokens = request.num_tokens + request.num_drafts
            count = min(num_tokens - request.num_computed_tokens, left, share or left)
            if request.num_drafts:
                drafts[request.name] = [-1] * request.num_drafts
            left -= count
            counts[request.name] = count
            if request in ready:
                self.waiting.remove(request)
                self.deferred_waiting.discard(request)
                self.running.append(request)
                new.append(SimpleNamespace(req_id=request.name, num_computed_tokens=request.num_computed_tokens))
            else:
                cached.req_ids.append(request.name)
                cached.num_computed_tokens.append(request.num_computed_tokens)
            request.num_computed_tokens += count
        return SimpleNamespace(
            num_scheduled_tokens=counts,
            total_num_scheduled_tokens=sum(counts.values()),
            scheduled_new_reqs=new,
            scheduled_cached_reqs=cached,
            scheduled_spec_decode_tokens=drafts,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Each request whose known tokens are computed gets one more, and those of its drafts that are accepted."""
        self.num_updates += 1
        for name in scheduler_output.num_scheduled_tokens:
            request = self.requests.get(name)
            if request is not None and request.num_computed_tokens >= request.num_tokens:
                num_drafts = len(scheduler_output.scheduled_spec_decode_tokens.get(name, ()))
                row = model_runner_output.req_id_to_index[name] if num_drafts else 0
                num_sampled = len(model_runner_output.sampled_token_ids[row]) if num_drafts else 1
                request.num_computed_tokens -= num_drafts + 1 - num_sampled
                request.num_tokens += num_sampled
        return {}

    def finish(self, name: str) -> None:
        self.running.remove(self.requests.pop(name))
