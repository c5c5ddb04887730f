"""When an answer ends. Pure functions of a request and its newest token; stop strings are the frontend's."""

from __future__ import annotations

from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.request import Request


def stop_token_ids(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """The tokens that end an answer: the request's own, and the model's end of sequence unless it is ignored."""
    return frozenset(sampling.stop_token_ids).union(() if sampling.ignore_eos else eos_token_ids)


def finish_reason(request: Request, token_id: int, num_new: int = 0) -> FinishReason | None:
    """Why the answer ends with ``token_id``, its newest token; None if it continues. ``num_new``: 1 if the request does
    not have the token yet."""
    if token_id in request.stop_ids and request.num_output_tokens + num_new >= request.sampling.min_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.token_ids) + num_new >= request.length_limit else None


def reported_stop_token(request: Request, token_id: int | None) -> int | None:
    """The stop token to report to the client: one of the request's stop tokens, never the model's end of sequence."""
    return token_id if token_id in request.sampling.stop_token_ids else None
