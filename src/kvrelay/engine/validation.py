"""What every engine asks of a request's tokens before it takes the request in. Pure."""

from __future__ import annotations

from kvrelay.core.token_ids import are_below
from kvrelay.engine.request import Request
from kvrelay.errors import InvalidInputError, PromptTooLongError


def check_tokens(request: Request, *, is_running: bool, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidInputError or PromptTooLongError unless ``request`` can be served. Lengths in tokens.

    ``is_running``: whether a request of its id is known already.
    """
    if is_running:
        raise InvalidInputError(f"request {request.request_id} is running already", param="request_id")
    if not request.num_prompt_tokens:
        raise InvalidInputError("the prompt is empty", param="prompt")
    if not are_below(request.token_ids, vocab_size):
        raise InvalidInputError(f"prompt tokens must be between 0 and {vocab_size - 1}", param="prompt")
    num_answer_tokens = 0 if request.is_prefill_only else 1
    if len(request.token_ids) + num_answer_tokens - min(request.num_output_tokens, 1) > max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(request.token_ids)} tokens, more than the {max_model_len} of the context leave room "
            "for",
            param="prompt",
            code="context_length_exceeded",
        )
