"""The text of one choice: its tokens detokenized, up to the stop string or stop token that ends it.

It does not know where the tokens come from, or how answers are sent.

Stop strings are found whatever the cuts between pieces. Text that may begin a stop string is held back until that is
clear, so that no part of a stop string, and nothing after one, is ever sent. The stop string that is complete first
wins, and the longest of those that are complete at the same character.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.status import FinishReason
from kvrelay.frontend.openai.answer import ChoicePiece, Finish
from kvrelay.frontend.openai.answer_spec import AnswerSpec
from kvrelay.frontend.tokens.detokenizer import Detokenizer, NoText
from kvrelay.frontend.tokens.tokenizer import Tokenizer


class AnswerText:
    """One choice's text after a prompt. No stop string counts within the first ``min_tokens`` tokens."""

    def __init__(
        self, spec: AnswerSpec, tokenizer: Tokenizer, min_tokens: int, prompt_token_ids: Sequence[int] = ()
    ) -> None:
        self._includes_stop = spec.include_stop
        self._detokenizer: Detokenizer = NoText()
        if spec.detokenize:
            self._detokenizer = tokenizer.detokenizer(spec.skip_special_tokens, prompt_token_ids, spec.shown_tokens)
        self._stops = StopStrings(spec.stops, spec.include_stop) if spec.stops else None
        self._min_tokens = min_tokens

    def push(self, output: TokenOutput, num_tokens_before: int) -> ChoicePiece:
        """Add an output, which follows ``num_tokens_before`` tokens of the answer. The tokens of the piece are those of
        the output that belong to the answer."""
        if self._stops is not None:
            return self._push_with_stops(self._stops, output, num_tokens_before)
        reason, token_ids = output.finish_reason, output.token_ids
        if reason is None:
            return ChoicePiece(self._detokenizer.push(token_ids), token_ids, output.logprobs)
        is_hidden = self._hides_last(output)
        text = self._detokenizer.push(token_ids[:-1] if is_hidden else token_ids) + self._detokenizer.flush()
        return ChoicePiece(text, token_ids, output.logprobs, Finish(reason, output.stop_token))

    def _push_with_stops(self, stops: StopStrings, output: TokenOutput, num_tokens_before: int) -> ChoicePiece:
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
            return ChoicePiece("".join(shown), token_ids, logprobs)
        found = stops.push(self._detokenizer.flush())
        if isinstance(found, StopMatch):
            return _stopped(shown, found, token_ids, logprobs)
        return ChoicePiece(
            "".join((*shown, found, stops.flush())), token_ids, logprobs, Finish(reason, output.stop_token)
        )

    def _hides_last(self, output: TokenOutput) -> bool:
        """Whether the last token is a stop token, which is not part of the text."""
        return output.finish_reason is FinishReason.STOP and not self._includes_stop


def _stopped(
    shown: list[str], found: StopMatch, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] | None
) -> ChoicePiece:
    """The last piece, which a stop string ends."""
    return ChoicePiece("".join((*shown, found.text)), token_ids, logprobs, Finish(FinishReason.STOP, found.stop))


class StopMatch(msgspec.Struct, frozen=True):
    """The stop string that ended the text, and the text that may still be sent."""

    stop: str
    text: str


class StopStrings:
    """Matches several stop strings (none of them empty) over a stream of text."""

    def __init__(self, stops: Sequence[str], include_in_output: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include_in_output
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> str | StopMatch:
        """Add text. Returns the text that can be sent now, or the match that ends the sequence."""
        text = self._held + text
        found = self._find(text)
        if found is not None:
            end, start, stop = found
            self._held = ""
            return StopMatch(stop, text[: end if self._include else start])
        keep = self._num_undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The end of the text: the held text is not a stop string."""
        held, self._held = self._held, ""
        return held

    def _find(self, text: str) -> tuple[int, int, str] | None:
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return best

    def _num_undecided(self, text: str) -> int:
        """Length of the longest suffix of ``text`` that begins a stop string."""
        for size in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
