"""A request in vLLM's terms, and vLLM's outputs as pieces of an answer. Pure; vLLM's objects are known by attribute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.engine.request import Request
from kvrelay.engines.connector.terms import PARAMS_KEY
from kvrelay.engines.hosted.backend import FINISH_REASONS, AnswerChunk, AnswerError
from kvrelay.engines.hosted.moments import Moments
from kvrelay.engines.hosted.vllm_transfer import VllmTransfer

SEED_MASK = 2**63 - 1
SEED_STEP = 0x9E3779B97F4A7C15
"""An odd number with well-mixed bits: seeds of continued answers shall not be those of a neighbour's."""


class Logprob(Protocol):
    logprob: float
    rank: int | None


class DraftMetrics(Protocol):
    """Of a request's speculative decoding. ``histogram``: steps by how many drafted tokens were accepted."""

    num_draft_tokens: int
    histogram: Sequence[int]


class CompletionOutput(Protocol):
    """``spec_decode_metrics``: with the last tokens of an answer for which tokens were drafted."""

    token_ids: Sequence[int]
    logprobs: Sequence[Mapping[int, Logprob]] | None
    finish_reason: str | None
    spec_decode_metrics: DraftMetrics | None


class RequestStats(Protocol):
    """Of a request so far. The times are of the host's monotonic clock."""

    queued_ts: float
    scheduled_ts: float
    first_token_ts: float
    num_preemptions: int


class RequestOutput(Protocol):
    """The part of a RequestOutput that is read: with RequestOutputKind.DELTA the tokens are the new ones."""

    outputs: Sequence[CompletionOutput]
    finished: bool
    num_cached_tokens: int | None
    kv_transfer_params: Mapping[str, object] | None
    metrics: RequestStats | None
    prompt_logprobs: Sequence[Mapping[int, Logprob] | None] | None


def sampling_values(request: Request, num_tokens: int) -> dict[str, Any]:
    """Values of vLLM's SamplingParams for the next ``num_tokens`` tokens, all but ``output_kind`` and
    ``structured_outputs``.

    Ends are decided by the request's stop tokens alone, which include the model's end of sequence.
    """
    sampling = request.sampling
    return {
        # vLLM always samples one.
        "max_tokens": max(num_tokens, 1),
        "min_tokens": min(max(sampling.min_tokens - request.num_output_tokens, 0), num_tokens),
        "temperature": sampling.temperature,
        "top_k": max(sampling.top_k, 0),
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": sampling.logit_bias or None,
        "seed": _seed(sampling.seed, request.num_output_tokens),
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": True,
        "logprobs": sampling.logprobs,
        "prompt_logprobs": sampling.prompt_logprobs if request.wants_prompt_logprobs else None,
        "detokenize": False,
    }


def prefill_values(request: Request, kv_transfer_params: bytes | None = None, ticket: int = 0) -> dict[str, Any]:
    """The same for a prefill whose KV is saved as ``kv_transfer_params`` say, or else that another vLLM pulls. In that
    case vLLM keeps the KV only if the answer ends by its length. So stop tokens are left out, unless they are not to be
    sampled."""
    values = sampling_values(request, 1)
    if not values["min_tokens"]:
        values["stop_token_ids"] = []
    if kv_transfer_params is not None:
        return {**values, "extra_args": staged_values(kv_transfer_params, ticket)}
    asked, _ = VllmTransfer().prefill_body({})
    return {**values, "extra_args": {"kv_transfer_params": asked["kv_transfer_params"]}}


def staged_values(kv_transfer_params: bytes, ticket: int = 0) -> dict[str, Any]:
    """``extra_args`` for kvrelay's connector, whose reports name ``ticket``. The parameters are this worker's own."""
    params = msgspec.json.decode(kv_transfer_params)
    params[PARAMS_KEY]["ticket"] = ticket
    return {"kv_transfer_params": params}


def num_staged_blocks(kv_transfer_params: bytes) -> int:
    """Staging blocks of a request, of the same parameters."""
    return len(msgspec.json.decode(kv_transfer_params)[PARAMS_KEY]["block_ids"])


def _seed(seed: int | None, num_output_tokens: int) -> int | None:
    """vLLM draws its random numbers from the seed in order of its own steps. A continued answer must not draw those of
    its first tokens again."""
    return None if seed is None else (seed ^ (num_output_tokens * SEED_STEP)) & SEED_MASK


def is_answered(output: RequestOutput) -> bool:
    """Whether the answer is whole with this output. vLLM also finishes requests that it gives up."""
    return output.finished and all(each.finish_reason in FINISH_REASONS for each in output.outputs)


def piece_of(output: RequestOutput, *, num_logprobs: int | None) -> AnswerChunk:
    """Raises AnswerError for an output without a completion, and for an answer that vLLM has aborted."""
    if len(output.outputs) != 1:
        raise AnswerError(f"vLLM gave {len(output.outputs)} completions, one was asked for")
    completion = output.outputs[0]
    finish = None
    if output.finished:
        if completion.finish_reason not in FINISH_REASONS:
            raise AnswerError(f"vLLM ended the answer with {completion.finish_reason!r}")
        finish = FINISH_REASONS[completion.finish_reason]
    token_ids = tuple(completion.token_ids)
    logprobs = None
    if num_logprobs is not None and token_ids:
        positions = completion.logprobs or ()
        if len(positions) != len(token_ids):
            raise AnswerError("vLLM's logprobs do not belong to its tokens")
        logprobs = tuple(_position(token, known, num_logprobs) for token, known in zip(token_ids, positions))
    # A vLLM that does not count the drafts of a request lacks the name, too.
    moments = _moments(output.metrics, getattr(completion, "spec_decode_metrics", None))
    return AnswerChunk(token_ids, logprobs, finish, None, output.num_cached_tokens, moments)


def _moments(stats: RequestStats | None, drafts: DraftMetrics | None) -> Moments | None:
    if stats is None:
        return None
    return Moments(
        taken_in_s=stats.queued_ts,
        scheduled_s=stats.scheduled_ts,
        sampled_s=stats.first_token_ts,
        num_preemptions=stats.num_preemptions,
        num_drafted=drafts.num_draft_tokens if drafts else 0,
        num_accepted=sum(accepted * steps for accepted, steps in enumerate(drafts.histogram)) if drafts else 0,
    )


def prompt_logprobs_of(request: Request, output: RequestOutput) -> tuple[PositionLogprobs, ...]:
    """Of the prompt's tokens from the second one on. Raises AnswerError if they do not belong to it."""
    known, num_top = output.prompt_logprobs or (), request.sampling.prompt_logprobs or 0
    if len(known) != len(request.token_ids):
        raise AnswerError("vLLM's prompt logprobs do not belong to the prompt")
    # Those of an answer's tokens, which count as its prompt after a move, are not asked for.
    tokens = request.token_ids[1 : request.num_prompt_tokens]
    return tuple(_position(token, each or {}, num_top) for token, each in zip(tokens, known[1:]))


def _position(token_id: int, known: Mapping[int, Logprob], num_top: int) -> PositionLogprobs:
    """The chosen token, and the alternatives by rank. vLLM lists the chosen one among them, whatever its rank."""
    if token_id not in known:
        raise AnswerError("vLLM gave no logprob of a token that it chose")
    found = sorted(
        (TokenLogprob(token, value.logprob, value.rank or 0) for token, value in known.items()),
        key=lambda each: (each.rank, each.token_id),
    )
    chosen = next(each for each in found if each.token_id == token_id)
    return PositionLogprobs(chosen, tuple(each for each in found if 1 <= each.rank <= num_top)[:num_top])
