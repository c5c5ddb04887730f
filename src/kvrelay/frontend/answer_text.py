"""The text of one choice: its tokens detokenized, up to the stop string or stop token that ends it.

It does not know where the tokens come from, or how answers are sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.frontend.detokenizer import NoText
from kvrelay.frontend.openai.answer import Finish, Piece
from kvrelay.frontend.openai.plan import GenerationPlan
from kvrelay.frontend.stop_strings import StopMatch, StopStrings
from kvrelay.frontend.tokenizer import Tokenizer


class AnswerText:
    """One choice's text. No stop string counts within the first ``min_tokens`` tokens."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, min_tokens: int) -> None:
        self._includes_stop = plan.include_stop
        self._detokenizer = tokenizer.detokenizer(plan.skip_special_tokens) if plan.detokenize else NoText()
        self._stops = StopStrings(plan.stops, plan.include_stop) if plan.stops else None
        self._min_tokens = min_tokens

    def push(self, output: TokenOutput, num_tokens_before: int) -> Piece:
        """Add an output, which follows ``num_tokens_before`` tokens of the answer. The tokens of the piece are those of
        the output that belong to the answer."""
        if self._stops is not None:
            return self._push_with_stops(self._stops, output, num_tokens_before)
        reason, token_ids = output.finish_reason, output.token_ids
        if reason is None:
            return Piece(self._detokenizer.push(token_ids), token_ids, output.logprobs)
        is_hidden = self._hides_last(output)
        text = self._detokenizer.push(token_ids[:-1] if is_hidden else token_ids) + self._detokenizer.flush()
        return Piece(text, token_ids, output.logprobs, Finish(reason, output.stop_token))

    def _push_with_stops(self, stops: StopStrings, output: TokenOutput, num_tokens_before: int) -> Piece:
        reason, token_ids, logprobs = output.finish_reason, output.token_ids, output.logprobs
        hidden = len(token_ids) - 1 if self._hides_last(output) else -1
        shown: list[str] = []
        for number, token in enumerate(token_ids):
            if number == hidden:
                continue
            text = self._detokenizer.push((token,))
            if num_tokens_before + number + 1 <= self._min_tokens:
                shown.append(text)
                continue
            found = stops.push(text)
            if isinstance(found, StopMatch):
                used = slice(number + 1)
                return _stopped(shown, found, token_ids[used], logprobs[used] if logprobs is not None else None)
            shown.append(found)
        if reason is None:
            return Piece("".join(shown), token_ids, logprobs)
        found = stops.push(self._detokenizer.flush())
        if isinstance(found, StopMatch):
            return _stopped(shown, found, token_ids, logprobs)
        return Piece("".join((*shown, found, stops.flush())), token_ids, logprobs, Finish(reason, output.stop_token))

    def _hides_last(self, output: TokenOutput) -> bool:
        """Whether the last token is a stop token, which is not part of the text."""
        return output.finish_reason is FinishReason.STOP and not self._includes_stop


def _stopped(
    shown: list[str], found: StopMatch, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] | None
) -> Piece:
    """The last piece, which a stop string ends."""
    return Piece("".join((*shown, found.text)), token_ids, logprobs, Finish(FinishReason.STOP, found.stop))
