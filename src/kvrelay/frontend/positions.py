"""Checks that a worker's output continues the known answer: no token may be missing or repeated."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core.messages import TokenOutput
from kvrelay.errors import KvrelayError


class MissingTokensError(KvrelayError):
    """Outputs were lost on their way, so the connection that lost them must end."""


def unseen_part(output: TokenOutput, num_known: int) -> TokenOutput | None:
    """The part of ``output`` that is new to an answer with ``num_known`` known tokens; None if nothing is new.

    Raises MissingTokensError if the output begins further on.
    """
    if output.position == num_known:
        return output
    if output.position > num_known:
        raise MissingTokensError(f"tokens {num_known} to {output.position - 1} of {output.request_id} are missing")
    num_seen = num_known - output.position
    if num_seen >= len(output.token_ids) and output.finish_reason is None:
        return None
    logprobs = output.logprobs[num_seen:] if output.logprobs is not None else None
    return msgspec.structs.replace(output, token_ids=output.token_ids[num_seen:], logprobs=logprobs, position=num_known)


def contradicts(output: TokenOutput, known: Sequence[int]) -> bool:
    """Whether ``output`` has another token than the known answer at a position that is known."""
    return any(token != expected for token, expected in zip(output.token_ids, known[output.position :], strict=False))
