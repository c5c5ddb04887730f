"""The contract with what computes: a request in, the pieces of its answer out.

All methods but ``check`` are called in one event loop, that of the host's thread: ``open`` first, ``close`` last.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

import msgspec

from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.engine.request import Request
from kvrelay.engines.hosted.moments import Moments
from kvrelay.errors import KvrelayError

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
"""By the names of the OpenAI API, which vLLM uses too."""
GRAMMAR_FIELDS = {GrammarKind.JSON_SCHEMA: "json", GrammarKind.REGEX: "regex", GrammarKind.LARK: "grammar"}


def structured_values(grammar: Grammar) -> dict[str, object]:
    """Values of vLLM's StructuredOutputsParams, which other servers take too."""
    is_schema = grammar.kind is GrammarKind.JSON_SCHEMA
    return {GRAMMAR_FIELDS[grammar.kind]: msgspec.json.decode(grammar.source) if is_schema else grammar.source}


def one_line(error: BaseException) -> str:
    """What an exception says, for a message or the log; a BackendError in full."""
    text = error.in_full if isinstance(error, BackendError) else str(error)
    return " ".join(text.split())[:500] or type(error).__name__


def ignore(num_blocks: int) -> None:
    """A ``saved`` of no use."""


class BackendError(KvrelayError):
    """``message`` may reach clients: it names no address and repeats nothing that a server said. ``detail`` is for
    the log."""

    def __init__(self, message: str, *, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail

    @property
    def in_full(self) -> str:
        """For the log."""
        return f"{self.message}: {self.detail}" if self.detail else self.message


class AnswerError(BackendError):
    """The answer is malformed, or ends with an error. Another worker may succeed."""


class BackendRefusedError(BackendError):
    """The backend refuses the request. ``status`` is HTTP's; ``retry_after_s`` is the requested wait."""

    def __init__(self, message: str, status: int, retry_after_s: float = 1.0, *, detail: str = "") -> None:
        super().__init__(message, detail=detail)
        self.status = status
        self.retry_after_s = retry_after_s


class UnconfirmedError(KvrelayError):
    """The backend does not say whether it still uses staging blocks of a request that was cancelled."""


class AnswerChunk(msgspec.Struct, frozen=True):
    """The next tokens of an answer, in order. ``logprobs``: one for each, if there are any. ``finish``: the answer ends
    with them. The counts and ``moments`` are None if the backend tells none. ``prompt_logprobs``: with the first piece,
    if the request wants them; of the prompt's second token, and so on."""

    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish: FinishReason | None = None
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    moments: Moments | None = None
    prompt_logprobs: tuple[PositionLogprobs, ...] | None = None


class Prefilled(msgspec.Struct, frozen=True):
    """What the decode worker's backend needs to get the KV of a prefill: a JSON object, or None if the KV is in the
    worker's staging pool. ``piece`` has the first token, if there is one by now."""

    kv_transfer_params: bytes | None
    piece: AnswerChunk | None = None


class Backend(Protocol):
    """What computes. It never repeats a request: the cluster, which knows the tokens so far, decides about retries."""

    @property
    def name(self) -> str:
        """For messages, also to clients: without an address."""

    @property
    def samples_ids(self) -> bool:
        """Whether its token ids are those that it sampled. Otherwise they are made from text: then stop tokens cannot
        be recognised, and only ``AnswerChunk.finish`` ends an answer."""

    @property
    def tells_moments(self) -> bool:
        """Whether its pieces have ``moments``."""

    @property
    def scores_prompts(self) -> bool:
        """Whether it takes requests without an answer (``Request.is_prefill_only``). A token that it samples all the
        same does not count."""

    def check(self, sampling: SamplingParams) -> None:
        """Raise InvalidInputError for a request that it cannot serve, WorkerUnavailableError for one that another
        worker may serve. From any thread."""

    async def open(self) -> None: ...

    def stream(
        self, request: Request, num_tokens: int, kv_transfer_params: bytes | None = None
    ) -> AsyncGenerator[AnswerChunk, None]:
        """The next ``num_tokens`` tokens of ``request``. Tokens generated before, here or by another worker, count as
        its prompt. Closing the iterator aborts the request.

        With ``kv_transfer_params``, which a prefill worker's backend gave (``Prefilled``), this backend gets the KV of
        the prompt from that one; or they name the worker's staging blocks that hold it. Raises BackendRefusedError
        before the first piece, AnswerError for a broken or incomplete answer.

        When the iterator is closed, the backend uses no staging block of the request any more. UnconfirmedError if it
        does not confirm that.
        """

    def prefill(
        self, request: Request, kv_transfer_params: bytes | None = None, saved: Callable[[int], None] = ignore
    ) -> AsyncGenerator[Prefilled, None]:
        """Compute the KV of ``request`` for another backend, and keep it until that one has it; or save it in the
        worker's staging blocks that ``kv_transfer_params`` name. One item, then perhaps some time until nothing is left
        to do. Closing the iterator before its end gives the prefill up.

        ``saved(n)``: the first n of those staging blocks hold their KV. All do when the item comes.

        Only if ``EngineFacts.hands_over_kv``. Raises like ``stream``.
        """

    async def discard(self, kv_transfer_params: bytes) -> None:
        """Another backend keeps KV that this one will not get: let it be freed. Only if ``EngineFacts.moves_kv``.
        Raises like ``stream``."""

    async def failure(self) -> str | None:
        """Why it cannot go on, or None. Called about once a second."""

    async def clear_cache(self) -> None:
        """Forget cached prefixes, if this is possible; running requests continue."""

    async def close(self) -> None: ...


class AdapterStore(Protocol):
    """A backend's adapters (LoRA) that come and go at run time, all methods in the same event loop."""

    @property
    def is_full(self) -> bool: ...

    async def load(self, entry: AdapterEntry) -> None:
        """Raises InvalidInputError for an adapter that the backend cannot have. One that it has stays as it is."""

    async def drop(self, adapter: str) -> None:
        """Forget an adapter, by its id, that no request uses. Raises WorkerUnavailableError: it stays, and counts."""
