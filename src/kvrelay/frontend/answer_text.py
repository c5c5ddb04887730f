"""The text of one choice: its tokens detokenized, up to the stop string or stop token that ends it.

It does not know where the tokens come from, or how answers are sent.
"""

from __future__ import annotations

from typing import NamedTuple

from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.frontend.detokenizer import NoText
from kvrelay.frontend.openai.answer import Finish
from kvrelay.frontend.openai.plan import GenerationPlan
from kvrelay.frontend.stop_strings import StopMatch, StopStrings
from kvrelay.frontend.tokenizer import Tokenizer


class NewText(NamedTuple):
    """What an output adds: the text that may be sent now, how many of the output's tokens belong to the answer, and the
    finish if the answer ends here."""

    text: str
    num_used: int
    finish: Finish | None


class AnswerText:
    """One choice's text. No stop string counts within the first ``min_tokens`` tokens."""

    def __init__(self, plan: GenerationPlan, tokenizer: Tokenizer, min_tokens: int) -> None:
        self._includes_stop = plan.include_stop
        self._detokenizer = tokenizer.detokenizer(plan.skip_special_tokens) if plan.detokenize else NoText()
        self._stops = StopStrings(plan.stops, plan.include_stop) if plan.stops else None
        self._min_tokens = min_tokens

    def push(self, output: TokenOutput, num_tokens_before: int) -> NewText:
        """Add an output, which follows ``num_tokens_before`` tokens of the answer."""
        if self._stops is not None:
            return self._push_with_stops(self._stops, output, num_tokens_before)
        reason, token_ids = output.finish_reason, output.token_ids
        if reason is None:
            return NewText(self._detokenizer.push(token_ids), len(token_ids), None)
        is_hidden = self._hides_last(output)
        text = self._detokenizer.push(token_ids[:-1] if is_hidden else token_ids) + self._detokenizer.flush()
        return NewText(text, len(token_ids), Finish(reason, output.stop_token))

    def _push_with_stops(self, stops: StopStrings, output: TokenOutput, num_tokens_before: int) -> NewText:
        reason, num_tokens = output.finish_reason, len(output.token_ids)
        hidden = num_tokens - 1 if self._hides_last(output) else -1
        shown: list[str] = []
        for number, token in enumerate(output.token_ids):
            if number == hidden:
                continue
            text = self._detokenizer.push((token,))
            if num_tokens_before + number + 1 <= self._min_tokens:
                shown.append(text)
                continue
            found = stops.push(text)
            if isinstance(found, StopMatch):
                return NewText("".join((*shown, found.text)), number + 1, Finish(FinishReason.STOP, found.stop))
            shown.append(found)
        if reason is None:
            return NewText("".join(shown), num_tokens, None)
        found = stops.push(self._detokenizer.flush())
        if isinstance(found, StopMatch):
            return NewText("".join((*shown, found.text)), num_tokens, Finish(FinishReason.STOP, found.stop))
        return NewText("".join((*shown, found, stops.flush())), num_tokens, Finish(reason, output.stop_token))

    def _hides_last(self, output: TokenOutput) -> bool:
        """Whether the last token is a stop token, which is not part of the text."""
        return output.finish_reason is FinishReason.STOP and not self._includes_stop
