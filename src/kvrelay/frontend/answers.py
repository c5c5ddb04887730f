"""How the sequences of one request become its answer: streamed as they arrive, or collected and sent as a whole.

Both listen to all sequences of a request, and resolve a future when the last one has finished or the first has failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Items

from kvrelay.core.handoff import PositionLogprobs
from kvrelay.errors import KvrelayError
from kvrelay.frontend.http import Exchange
from kvrelay.frontend.openai.answer import AnswerFormat, Choice, Finish, PromptTokensDetails, Usage
from kvrelay.frontend.openai.plan import GenerationPlan
from kvrelay.frontend.sequence import Sequence

NUM_ALTERNATIVES = 20
START_COST = 1024
TURN_COST = 2**16
"""Tokens that are hashed, routed and sent in one turn of the loop, about 3 ms; a sequence costs as much as 1,024."""
EVENT_STREAM = b"text/event-stream; charset=utf-8"
DONE_EVENT = b"data: [DONE]\n\n"


class Answer:
    """Base of both: the sequences, and the moment when all have ended."""

    def __init__(self, plan: GenerationPlan, form: AnswerFormat) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._plan = plan
        self._form = form
        self._sequences: list[Sequence] = []
        self._num_open = 0

    async def start(self, sequences: Iterable[Sequence], num_sequences: int) -> None:
        """Place all sequences, a few per turn of the loop. Returns early if one of them has failed.

        Raises RetryElsewhereError; the sequences that were already placed are then cancelled.
        """
        self._num_open = num_sequences
        cost = 0
        try:
            for sequence in sequences:
                self._sequences.append(sequence)
                sequence.start()
                cost += START_COST + len(sequence.spec.prompt_token_ids)
                if cost >= TURN_COST:
                    cost = 0
                    await asyncio.sleep(0)
                    if self.done.done():
                        return
        except BaseException:
            self.cancel()
            raise

    def cancel(self) -> None:
        """End the sequences that still run."""
        for sequence in self._sequences:
            sequence.cancel()
        if self.done.done() and not self.done.cancelled():
            # Starting the sequences may have failed first; asyncio complains of exceptions that are never retrieved.
            self.done.exception()

    def gone(self) -> None:
        """The client went away."""
        self.cancel()
        if not self.done.done():
            self.done.set_exception(ClientGoneError("the client went away"))

    def failed(self, sequence: Sequence, error: KvrelayError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def usage(self) -> Usage:
        """Usage of the whole request; a prompt counts once, however many choices it has."""
        prompts = self._sequences[:: self._plan.n]
        num_prompt = sum(len(sequence.spec.prompt_token_ids) for sequence in prompts)
        num_output = sum(len(sequence.output_token_ids) for sequence in self._sequences)
        cached = sum(sequence.num_cached_tokens for sequence in prompts)
        return Usage(num_prompt, num_prompt + num_output, num_output, PromptTokensDetails(cached))

    def _one_finished(self) -> None:
        self._num_open -= 1
        if self._num_open == 0 and not self.done.done():
            self.done.set_result(None)


class ClientGoneError(KvrelayError):
    """The client has gone, so no answer is needed."""


def require_client(exchange: Exchange) -> None:
    """Raise ClientGoneError if the client has gone."""
    if exchange.is_gone:
        raise ClientGoneError("the client went away")


class StreamedAnswer(Answer):
    """Server-sent events: one write per output of a sequence. The head is sent with the first one, so that a request
    that every worker refuses still gets a status."""

    def __init__(
        self, plan: GenerationPlan, form: AnswerFormat, exchange: Exchange, headers: Items[tuple[bytes, bytes]]
    ) -> None:
        super().__init__(plan, form)
        self._exchange = exchange
        self._headers = headers
        self._opened: set[int] = set()
        self._every_token = plan.return_token_ids or plan.continuous_usage

    def deliver(
        self,
        sequence: Sequence,
        text: str,
        token_ids: Items[int],
        logprobs: Items[PositionLogprobs] | None,
        finish: Finish | None,
    ) -> None:
        index = sequence.index
        is_first = index not in self._opened
        if text or finish is not None or logprobs or self._every_token:
            usage = self._usage_of(sequence) if self._plan.continuous_usage else None
            data = self._form.chunk(index, text, token_ids, logprobs, finish, usage)
            if is_first:
                data = self._open(sequence) + data
            if data:
                self._exchange.write(data)
        elif is_first:
            opening = self._open(sequence)
            if opening:
                self._exchange.write(opening)
        if finish is not None:
            self._one_finished()

    def finish(self) -> None:
        """All sequences have finished."""
        tail = self._form.usage_event(self.usage()) if self._plan.include_usage else b""
        self._exchange.write(tail + DONE_EVENT)
        self._exchange.finish()

    def finish_broken(self, event: bytes) -> None:
        """The stream ends with an error event, never silently."""
        self._exchange.write(event + DONE_EVENT)
        self._exchange.finish()

    def _open(self, sequence: Sequence) -> bytes:
        self._opened.add(sequence.index)
        if not self._exchange.is_started:
            worker = (b"x-kvrelay-worker", sequence.worker_id.encode())
            self._exchange.start_stream(EVENT_STREAM, [*self._headers, worker])
        return self._form.opening(sequence.index, sequence.spec.prompt_token_ids, sequence.prompt_logprobs)

    def _usage_of(self, sequence: Sequence) -> Usage:
        num_prompt, num_output = len(sequence.spec.prompt_token_ids), len(sequence.output_token_ids)
        return Usage(num_prompt, num_prompt + num_output, num_output)


class WholeAnswer(Answer):
    """Collected, and sent when all sequences have finished."""

    def __init__(self, plan: GenerationPlan, form: AnswerFormat) -> None:
        super().__init__(plan, form)
        self._choices: dict[int, Choice] = {}

    def deliver(
        self,
        sequence: Sequence,
        text: str,
        token_ids: Items[int],
        logprobs: Items[PositionLogprobs] | None,
        finish: Finish | None,
    ) -> None:
        choice = self._choices.get(sequence.index)
        if choice is None:
            choice = Choice(sequence.index, sequence.spec.prompt_token_ids, prompt_logprobs=sequence.prompt_logprobs)
            self._choices[sequence.index] = choice
        choice.text.append(text)
        choice.token_ids += token_ids
        choice.logprobs += logprobs or ()
        if finish is not None:
            choice.finish = finish
            self._one_finished()

    @property
    def size(self) -> int:
        """Number of tokens, with all their alternatives."""
        return sum(
            len(choice.prompt_token_ids) + len(choice.token_ids) + NUM_ALTERNATIVES * len(choice.logprobs)
            for choice in self._choices.values()
        )

    def body(self) -> bytes:
        choices = [self._choices[index] for index in sorted(self._choices)]
        return self._form.whole(choices, self.usage())

    @property
    def worker_id(self) -> str:
        return self._sequences[0].worker_id
