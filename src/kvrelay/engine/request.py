"""A request as the engine sees it: its tokens, its blocks, its state, and the time of each change of state.

It owns the state of one sequence and the moves between states (``core/status.py``). It does not decide anything: the
scheduler does. Whether a prefill runs here or elsewhere is decided above the engine and travels with the request.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field

from kvrelay.core.handoff import HandoffId, PrefixHolder
from kvrelay.core.hashing import compute_sequence_hashes
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RequestStatus, check_transition
from kvrelay.core.token_ids import are_below, outside
from kvrelay.engine.pauses import Pause, Session
from kvrelay.errors import InvalidInputError, PromptTooLongError
from kvrelay.placement.base import Objectives
from kvrelay.placement.cost import PlacementState

UINT64_MASK = 2**64 - 1


class PrefillMode(enum.Enum):
    """Where the prefill of a request is computed."""

    LOCAL = "local"
    """Here, like the decode that follows."""
    REMOTE = "remote"
    """Decode side: a prefill worker computes it into our blocks."""
    HANDOFF = "handoff"
    """Prefill side: here, for a decode worker. The engine samples one token, then holds the blocks until they are sent.
    """


_WAITING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.KV_HELD})

MoveListener = Callable[["Request", RequestStatus], None]
"""Gets a request that moves to a state, while it is still in the one before."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One sequence.

    ``token_ids`` is the prompt followed by the generated tokens; ``num_computed_tokens`` of them have their KV in
    ``block_ids``. ``output_token_ids`` are tokens that another worker generated before this engine got the request.
    ``num_load_tokens`` (HANDOFF) counts the tokens whose KV the decode worker has already: a multiple of the block
    size.
    """

    request_id: str
    prompt_token_ids: InitVar[Sequence[int]]
    sampling: SamplingParams
    output_token_ids: InitVar[Sequence[int]] = field(default=(), kw_only=True)
    mode: PrefillMode = field(default=PrefillMode.LOCAL, kw_only=True)
    num_load_tokens: int = field(default=0, kw_only=True)
    priority: int = field(default=0, kw_only=True)
    handoff_number: int = field(default=0, kw_only=True)
    """REMOTE: the number of its hand-off if others know it already (prefill-first); 0: the engine counts."""
    tenant: str = field(default="", kw_only=True)
    """The API key, or another name among which service is shared fairly; empty: none."""
    traceparent: str = field(default="", kw_only=True)
    """The request's trace, for an engine that sends spans of its own."""
    placement: PlacementState | None = field(default=None, kw_only=True)
    """Where the prefill runs, if that is still to be decided or to be explained; None: ``mode`` alone says it."""
    report_interval: int = field(default=1, kw_only=True)
    """Tokens to report at once; those with log-probabilities are reported one by one."""
    holder: PrefixHolder | None = field(default=None, kw_only=True)
    """Another worker that has more of the prompt's KV, until that was tried."""
    listener: MoveListener | None = field(default=None, kw_only=True)
    """Told of each move, on the engine's thread."""
    is_only_here: bool = field(default=False, init=False)
    """No other worker that may pull its prefill has its adapter."""
    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    is_resumed: bool = field(init=False)
    """Whether another worker began it: its stream stands still until this engine serves it."""
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    times: list[tuple[RequestStatus, float]] = field(default_factory=list, init=False)
    """Each state with the clock's time of entering it."""

    # Set by the engine at arrival.
    arrival: int = field(default=0, init=False)
    seed: int = field(default=0, init=False)
    stop_ids: frozenset[int] = field(default=frozenset(), init=False)
    length_limit: int = field(default=0, init=False)
    """Length in tokens at which the answer ends."""
    tail_tokens: int = field(default=0, init=False)
    """``KVLayout.tail_tokens``."""

    # The scheduler's.
    session: Session | None = field(default=None, init=False)
    """Of an earlier request whose prompt this one repeats."""
    pause: Pause | None = field(default=None, init=False)
    """The session's, which ended as this request came, until the request has its blocks."""
    num_queued_tokens: int = field(default=0, init=False)
    """Tokens to compute, as estimated when it began to wait; 1 or more while it waits."""
    num_stored_tokens: int = field(default=0, init=False)
    """Of those that need not be computed: what sources beyond the pool have, and their loads take ``load_s``.
    Estimates of that moment."""
    load_s: float = field(default=0.0, init=False)
    stored_media: tuple[str, ...] = field(default=(), init=False)
    """Where each block of it is."""
    slot: int = field(default=-1, init=False)
    block_ids: list[int] = field(default_factory=list, init=False)
    held_block_ids: list[int] = field(default_factory=list, init=False)
    """Blocks of the holding area that have its KV, or will have it."""
    num_computed_tokens: int = field(default=0, init=False)
    num_cached_blocks: int = field(default=0, init=False)
    """Leading blocks that are hits of the prefix cache or were offered to it."""
    sequence_hashes: list[int] = field(default_factory=list, init=False)
    _packed: array[int] = field(default_factory=lambda: array("I"), init=False)
    """The first of ``token_ids``, or all."""
    num_cached_tokens: int | None = field(default=None, init=False)
    """Prefix hit at first admission, as reported to clients."""
    first_output_sent: bool = field(default=False, init=False)
    is_late: bool = field(default=False, init=False)
    """Whether its first token came later than its objective."""
    num_reported: int = field(default=0, init=False)
    """Answer tokens that the frontend knows; counted only if ``report_interval`` is above 1."""
    prompt_logprobs: list[PositionLogprobs | None] = field(default_factory=list, init=False)
    handoff_id: HandoffId | None = field(default=None, init=False)
    num_sent_blocks: int = field(default=0, init=False)
    """HANDOFF: leading blocks that the decode worker has or that were given to the sender."""
    abort_reason: FinishReason | None = field(default=None, init=False)
    """HANDOFF: the request was aborted while a transfer touches its blocks. This is its finish reason once the
    transfer has completed."""

    def __post_init__(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int]) -> None:
        self.token_ids = [*prompt_token_ids, *output_token_ids]
        if isinstance(prompt_token_ids, array):
            self._packed.extend(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.is_resumed = len(output_token_ids) > 0
        self.num_reported = len(output_token_ids)
        if self.sampling.logprobs is not None:
            self.report_interval = 1

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id}, {self.mode.value}, {self.status.name}, {self.num_prompt_tokens}+"
            f"{self.num_output_tokens} tokens, {self.num_computed_tokens} computed, {len(self.block_ids)} blocks)"
        )

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_handoff_tokens(self) -> int:
        """Known tokens whose KV another worker may compute; 0 or less: none."""
        return len(self.token_ids) - self.tail_tokens

    @property
    def num_held_tokens(self) -> int:
        """KV_HELD: known tokens whose KV is held. The first token has come with it, unless a tail is to be computed."""
        return len(self.token_ids) - max(self.tail_tokens, 1)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for admission and so holds no blocks of the pool."""
        return self.status in _WAITING

    @property
    def will_get_slot(self) -> bool:
        """Whether it is admitted without a slot: one is reserved until its KV has come to the pool."""
        is_remote = self.status is RequestStatus.REMOTE_PREFILLING and not self.held_block_ids
        return is_remote or self.status is RequestStatus.LOADING_KV

    @property
    def is_begun(self) -> bool:
        """Whether a client has seen a part of the answer: its stream stands still while the request waits."""
        return self.num_output_tokens > 0

    @property
    def waiting_since_s(self) -> float:
        """The clock's time of its arrival."""
        return self.times[0][1] if self.times else 0.0

    @property
    def entered_s(self) -> float:
        """The clock's time of entering its state."""
        return self.times[-1][1] if self.times else 0.0

    @property
    def objectives(self) -> Objectives | None:
        return None if self.placement is None else self.placement.objectives

    def is_late_at(self, now_s: float) -> bool:
        """Whether its first token has missed its objective by then."""
        if self.first_output_sent:
            return self.is_late
        objectives = self.objectives
        return objectives is not None and now_s - self.waiting_since_s > objectives.ttft_s

    @property
    def is_prefill_only(self) -> bool:
        """Whether no token is sampled: the prompt is only scored."""
        return self.sampling.max_tokens == 0 and not self.sampling.is_prefetch

    @property
    def is_half(self) -> bool:
        """Whether its session goes on with another request: of the worker that answers, or after a prefetch."""
        return self.mode is PrefillMode.HANDOFF or self.sampling.is_prefetch

    @property
    def keyless_priority(self) -> int:
        """The priority for a queue that knows no API keys: a key's priorities order its own requests only."""
        return 0 if self.tenant else self.priority

    @property
    def must_prefill_here(self) -> bool:
        """Whether no other worker may compute the prompt: prompt logprobs arise where the prompt is computed."""
        return self.sampling.max_tokens == 0 or self.wants_prompt_logprobs or self.is_only_here

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether prompt logprobs are still to be reported; the prefill must then compute every position."""
        return self.sampling.prompt_logprobs is not None and not self.first_output_sent

    def stay_here(self) -> None:
        """From now on the request is computed here."""
        self.mode = PrefillMode.LOCAL
        if self.placement is not None:
            self.placement.policy = None

    def leave_pair(self) -> bool:
        """The prefill worker that was to compute it will not. Whether it is placed anew, which happens once; else it is
        computed here."""
        self.stay_here()
        self.handoff_number = 0
        if self.placement is not None:
            self.placement.policy, self.placement.otherwise = self.placement.otherwise, None
        return self.placement is not None and self.placement.policy is not None

    @property
    def key(self) -> tuple[int, bool, int]:
        """Order of service: lower priority numbers first, then requests that another worker began, then first come,
        first served."""
        return (self.priority, not self.is_resumed, self.arrival)

    def move(self, status: RequestStatus, now_s: float) -> None:
        """Move to another state. Raises IllegalTransitionError unless the table allows it."""
        check_transition(self.status, status)
        if self.listener is not None:
            self.listener(self, status)
        self.status = status
        self.times.append((status, now_s))

    def hash_blocks(self, num_blocks: int, block_size: int, adapter: str = "") -> None:
        """Compute the missing hashes of the first ``num_blocks`` complete blocks. ``adapter``: the engine's, always the
        same; the request's own one goes before it."""
        known = len(self.sequence_hashes)
        if num_blocks <= known:
            return
        tokens = self.packed()[known * block_size : num_blocks * block_size]
        parent = self.sequence_hashes[-1] if known else None
        lora, salt = self.sampling.adapter or adapter or None, self.sampling.cache_salt
        self.sequence_hashes += compute_sequence_hashes(tokens, block_size, lora=lora, parent=parent, salt=salt)

    def packed(self) -> array[int]:
        """``token_ids`` as they are hashed, compared and copied without an object for each. Only to be read. Raises
        InvalidInputError for what is no token id."""
        try:
            self._packed.fromlist(self.token_ids[len(self._packed) :])
        except (OverflowError, TypeError) as exc:
            raise InvalidInputError(f"token ids must be unsigned 32-bit integers: {exc}", param="tokens") from exc
        return self._packed

    def cut(self, num_tokens: int) -> None:
        """The prompt ends after so many tokens."""
        del self.token_ids[num_tokens:], self._packed[num_tokens:]
        self.num_prompt_tokens = len(self.token_ids)


def service_order(request: Request) -> tuple[int, bool, int]:
    """``Request.key``, to sort by."""
    return request.key


def check_tokens(request: Request, *, is_running: bool, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidInputError or PromptTooLongError unless ``request`` can be served. Lengths in tokens.

    ``is_running``: whether a request of its id is known already.
    """
    if is_running:
        raise InvalidInputError(f"request {request.request_id} is running already", param="request_id")
    if not request.num_prompt_tokens:
        raise InvalidInputError("the prompt is empty", param="prompt")
    try:
        are_possible = are_below(request.packed(), vocab_size)
    except InvalidInputError:
        are_possible = False
    if not are_possible:
        found = outside(request.token_ids, vocab_size)
        raise InvalidInputError(f"prompt tokens must be between 0 and {vocab_size - 1}, got {found}", param="prompt")
    num_answer_tokens = 0 if request.is_prefill_only else 1
    if len(request.token_ids) + num_answer_tokens - min(request.num_output_tokens, 1) > max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(request.token_ids)} tokens, more than the {max_model_len} of the context leave "
            "room for"
        )
