"""When an answer ends, and what a step reports of a request: its tokens for the frontend, its blocks for the sender.

Stop strings are the frontend's. A report records on the request what has been reported.
"""

from __future__ import annotations

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.request import Request
from kvrelay.engine.step import HandoffChunk, StepOutput


def report_token(
    output: StepOutput,
    request: Request,
    token_id: int | None,
    logprobs: PositionLogprobs | None,
    reason: FinishReason | None,
) -> None:
    """Report one token, and those held back before it, with the extras of a first token and the finish reason of a last
    one. The request has the token already. ``token_id`` None: there is no new token, only an end."""
    first = not request.first_output_sent
    new: tuple[int, ...] = () if token_id is None else (token_id,)
    if request.report_interval > 1:
        new = tuple(request.token_ids[request.num_prompt_tokens + request.num_reported :])
        request.num_reported = request.num_output_tokens
    with_prompt = first and request.sampling.prompt_logprobs is not None
    output.outputs.append(
        TokenOutput(
            request.request_id,
            new,
            finish_reason=reason,
            logprobs=None if logprobs is None else (logprobs,),
            num_cached_tokens=request.num_cached_tokens if first else None,
            prompt_logprobs=(None, *request.prompt_logprobs) if with_prompt else None,
            stop_token=reported_stop_token(request, token_id) if reason is FinishReason.STOP else None,
            position=request.num_output_tokens - len(new),
            decision=_explanation(request) if first else "",
        )
    )
    request.first_output_sent = True


def _explanation(request: Request) -> str:
    placement = request.placement
    return str(placement.decision) if placement and placement.explain and placement.decision else ""


def handed_off_token(request: Request, token_id: int, logprobs: PositionLogprobs | None) -> TokenOutput:
    """The first token of a hand-off, as a frontend may be told of it. The request goes on elsewhere, so it does not get
    the token here."""
    reason = finish_reason(request, token_id, num_new=1)
    return TokenOutput(
        request.request_id,
        (token_id,),
        finish_reason=reason,
        logprobs=None if logprobs is None else (logprobs,),
        num_cached_tokens=request.num_cached_tokens,
        stop_token=reported_stop_token(request, token_id) if reason is FinishReason.STOP else None,
        position=request.num_output_tokens,
    )


def report_blocks(output: StepOutput, request: Request, block_size: int) -> None:
    """For the sender: the blocks that have become complete since the last call, if any."""
    end = request.num_computed_tokens // block_size
    if end > request.num_sent_blocks:
        _report_chunk(output, request, end, last=False)


def report_last_blocks(
    output: StepOutput, request: Request, token_id: int | None, logprobs: PositionLogprobs | None
) -> None:
    """For the sender: all other blocks, the last of which may be partly filled, and the first token if it is sampled
    here."""
    first_output = None if token_id is None else handed_off_token(request, token_id, logprobs)
    _report_chunk(output, request, len(request.block_ids), last=True, first_output=first_output)


def _report_chunk(
    output: StepOutput, request: Request, end: int, *, last: bool, first_output: TokenOutput | None = None
) -> None:
    first, request.num_sent_blocks = request.num_sent_blocks, end
    block_ids = tuple(request.block_ids[first:end])
    output.handoff_chunks.append(
        HandoffChunk(request.request_id, first, block_ids, last=last, first_output=first_output)
    )


def stop_token_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end an answer: the request's own, and the model's end of sequence unless it is ignored."""
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)


def finish_reason(request: Request, token_id: int, num_new: int = 0) -> FinishReason | None:
    """Why the answer ends with ``token_id``, its newest token; None if it continues. ``num_new``: 1 if the request does
    not have the token yet.

    A grammar wins over ``min_tokens``: before those are there, a stop token is sampled only if nothing else matches.
    """
    is_long = request.num_output_tokens + num_new >= request.sampling.min_tokens
    if token_id in request.stop_ids and (is_long or request.sampling.grammar is not None):
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) + num_new >= request.length_limit else None


def reported_stop_token(request: Request, token_id: int | None) -> int | None:
    """The stop token to report to the client: one of the request's stop tokens, never the model's end of sequence."""
    return token_id if token_id in request.sampling.stop_token_ids else None
