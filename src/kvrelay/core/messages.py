"""The messages between frontends and workers, and an operator's. ``rpc.wire`` has their frames.

Those between two workers are in ``handoff.messages``.
"""

from __future__ import annotations

import msgspec

from kvrelay.core.activity import Activity, Seconds
from kvrelay.core.handoff import HandoffOrder, Pair, PrefixHolder
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason, RefusalKind
from kvrelay.core.token_ids import ID_BYTES, from_bytes

PROTOCOL_VERSION = 11
"""Of all frames of the request plane: the first byte of each."""


class GenerateRequest(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Frontend to worker: generate. ``worker_id`` is a fence: another incarnation at this address refuses the request.

    If ``output_token_ids`` is not empty, the request continues from another worker: this worker prefills
    prompt + output and counts on (limits, seeds, penalties) from there.

    Prefill-first, the frontend has decided where the prefill runs. With ``pair`` both workers get the request, under an
    id that carries their addresses (``core/pair_id.py``): the one that ``worker_id`` names acts as its half. Without
    ``pair`` the worker prefills itself.

    ``tenant`` names who asks (an API key's name), for fair waiting between them. ``slo_ttft_ms`` and ``slo_itl_ms`` are
    the request's own objectives, in milliseconds; 0: the worker's. ``explain``: the answer says where the prefill ran.
    ``traceparent``: W3C's header of the request's trace, for an engine that sends spans of its own; empty: none.
    ``prompt`` has the prompt's token ids as ``core.token_ids.to_bytes`` writes them: bytes are copied, where a list of
    integers is built one by one.
    ``report_interval``: how many tokens the frontend wants at once, when nobody reads them one by one. The first token
    and the end are told at once in any case. ``holder``: another worker that has more of the prompt's KV; a hint.
    ``remote_wait_s``: what a prefill waits at the prefill workers, as far as the frontend knows; None: it does not say.
    """

    request_id: str
    worker_id: str
    prompt: bytes
    sampling: SamplingParams
    output_token_ids: tuple[int, ...] = ()
    priority: int = 0
    order: HandoffOrder = HandoffOrder.DECODE_FIRST
    pair: Pair | None = None
    tenant: str = ""
    slo_ttft_ms: float = 0.0
    slo_itl_ms: float = 0.0
    explain: bool = False
    traceparent: str = ""
    report_interval: int = 1
    holder: PrefixHolder | None = None
    remote_wait_s: float | None = None

    def __post_init__(self) -> None:
        if len(self.prompt) % ID_BYTES:
            raise ValueError(f"{len(self.prompt)} bytes are no token ids")  # msgspec reports it as a malformed message

    @property
    def prompt_token_ids(self) -> list[int]:
        return from_bytes(self.prompt)

    @property
    def num_tokens(self) -> int:
        """Of prompt and output."""
        return len(self.prompt) // ID_BYTES + len(self.output_token_ids)


class PrefillLost(msgspec.Struct, frozen=True, tag=True):
    """Frontend to the decode worker of a pair: the prefill worker refused the request or is lost. If it has not claimed
    the hand-off yet, it never will: prefill locally."""

    request_id: str


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Frontend to worker: the client went away, or a stop string matched. No answer follows."""

    request_id: str


class SessionPaused(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Frontend to the worker that has answered: what the request's session does next. A hint about which KV to keep;
    no answer follows.

    ``kind``: what it waits for, the name of a tool for instance; empty: that is not known. ``within_s``: the client
    expects to be back in so many seconds; 0: it does not say. ``is_over``: the session will not continue.
    """

    request_id: str
    kind: str = ""
    within_s: Seconds = 0.0
    is_over: bool = False


class TokenOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """New tokens of one request. Only the last output of a request carries ``finish_reason``.

    ``position`` is the index of ``token_ids[0]`` in the answer: the number of tokens before it, including those that an
    earlier worker generated. A receiver that knows fewer has lost some.

    ``num_cached_tokens`` (prefix hit), ``prompt_logprobs`` and ``decision`` come with the first output. ``decision``:
    where the prefill ran, with the estimates, if the request asked. ``stop_token`` is the stop
    token id that ended the answer, if one did.
    ``is_final``: no other worker would do better, because the ``error`` is due to the request itself (its grammar
    failed) or to the model; ``status`` is its HTTP status then.
    ``marks``: when the request reached which phase (``kvrelay.marks``), with the first output and with the last; empty
    from a worker that makes none.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[PositionLogprobs, ...] | None = None
    num_cached_tokens: int | None = None
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    stop_token: int | None = None
    error: str | None = None
    position: int = 0
    is_final: bool = False
    decision: str = ""
    marks: bytes = b""
    status: int = 400


class OutputBatch(msgspec.Struct, frozen=True, tag=True):
    """Worker to frontend: all outputs of one engine step for this peer."""

    outputs: tuple[TokenOutput, ...]


class RequestRefused(msgspec.Struct, frozen=True, tag=True):
    """Worker to frontend: this worker does not take the request. ``retryable``: another worker may take it. ``kind``:
    the reason as a label; None from a worker that tells none."""

    request_id: str
    reason: str
    status: int
    retryable: bool
    retry_after_s: float = 1.0
    kind: RefusalKind | None = None


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Liveness and control: answered by Pong on the same connection."""

    nonce: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to Ping. With ``publish_secret``, sent to frontends only, the receiver verifies the seals of the
    worker's publications (``sealing``); empty: the worker does not seal them. ``activity``: until now, so that a
    frontend knows what comes after; an idle worker publishes seldom."""

    nonce: int
    worker_id: str
    publish_secret: bytes = b""
    activity: Activity | None = None


class AdminRequest(msgspec.Struct, frozen=True, tag=True):
    """An operator's command to a worker: ``drain``, ``status``, ``check_integrity``, ``clear_cache`` or ``role`` (with
    ``argument`` e.g. "both", or "both from prefill": only if that is its role)."""

    nonce: int
    command: str
    argument: str = ""


class AdminReply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a command: ``payload`` is JSON text; ``error`` is set instead if the command failed."""

    nonce: int
    payload: str = ""
    error: str | None = None
