"""The engine's contract with whatever computes a step, and with the worker that drives it.

``EngineCore.step()`` is schedule -> execute -> update. This module holds the values that pass between those three and
between the engine and the worker. No torch, no sockets, no asyncio.

Sequences and slots. A running sequence owns a *slot*, a row 0 <= slot < max_num_seqs of the executor's persistent state
(tokens, block table, sampling settings). The scheduler sends a sequence's data once, when it enters (NewSequence), and
afterwards only what changes: new block ids. The executor itself appends each token that it samples to the slot's
tokens. Scheduler and executor both advance the slot's number of computed tokens by ``num_tokens`` per step, and by one
less if the row sits out the step (NO_TOKEN).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from kvrelay.core.events import KvEvent, LoadMetrics
from kvrelay.core.handoff import HandoffId, RemotePrefillRequest
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.messages import TokenOutput
from kvrelay.core.sampling import SamplingParams

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]

NO_TOKEN = -1
"""In ModelOutput, of a row that sits out a step."""

NOT_NUMBERS = (
    "the model's scores are not finite numbers (NaN or infinity): its weights are damaged, or overflow with this prompt"
)
"""In ModelOutput, why a sequence cannot continue that is not at fault itself."""


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence enters slot ``slot``: at its first step, after preemption, or when its remote prefill has arrived.

    ``token_ids`` are all known tokens, prompt first, then ``len(token_ids) - num_prompt_tokens`` generated ones.
    The KV of the first ``num_computed_tokens`` is in ``block_ids`` already. ``seed`` is the sampling seed in force (the
    request's own, or the one drawn at arrival), 0 <= seed < 2**64.
    """

    slot: int
    request_id: str
    token_ids: Sequence[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: Sequence[int]
    sampling: SamplingParams
    seed: int


class SchedulerOutput(msgspec.Struct, frozen=True):
    """One step's work, read only: steps share arrays. Applied in the order: release, enter, append blocks, compute.

    The batch's B rows are ordered decodes first (``num_tokens`` 1), then prefill chunks: ``slots`` [B] int32,
    ``num_tokens`` [B] int32 tokens to compute from the slot's computed tokens on, ``samples`` [B] bool: whether the row
    ends at the last known token, so that the next token is sampled. ``block_slots``, ``block_indices``, ``block_ids``
    [M] int32: block_table[slot, index] = id. An output with B = 0 may still release and enter; the executor then runs
    no forward pass.
    """

    step: int
    new_seqs: tuple[NewSequence, ...]
    released_slots: tuple[int, ...]
    slots: Int32Array
    num_tokens: Int32Array
    samples: BoolArray
    block_slots: Int32Array
    block_indices: Int32Array
    block_ids: Int32Array

    @property
    def num_seqs(self) -> int:
        return len(self.slots)


class ModelOutput(msgspec.Struct, frozen=True):
    """``token_ids``: one per row with ``samples`` set, in row order. NO_TOKEN: the row sits out, because its grammar's
    mask is late. The last of its tokens does not count as computed, so its next step computes and samples it again.

    ``logprobs``: by row, for requests that ask for them.

    ``prompt_logprobs``: by row, for requests that ask for them and computed prompt tokens in this step: one entry for
    each prompt position p in [computed, computed + num_tokens) with p >= 1: the logprob of token p given those before
    it. The entry for the position after the chunk comes with the next chunk.

    ``failures``: by row, why this one sequence cannot continue (its grammar exploded, or NOT_NUMBERS); its token is
    meaningless.
    """

    token_ids: list[int]
    logprobs: dict[int, PositionLogprobs] = {}
    prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
    failures: dict[int, str] = {}


class Executor(Protocol):
    """Runs a step on devices: the torch runner, or the mock with its timing model. Used from one thread, except for
    ``prepare`` and ``checksum_blocks``."""

    @property
    def kv_layout(self) -> KVLayout: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_holding_blocks(self) -> int:
        """Blocks after those of the pool, in the same memory. No step reads or writes them (``engine.holding``)."""

    @property
    def num_spill_blocks(self) -> int:
        """Blocks after those of the holding area, in host memory of a pool on another device. No peer reaches them."""

    @property
    def kv_region(self) -> MemoryRegion:
        """The KV pool's memory with the holding area, valid until ``shutdown``; block b lies at
        ``address + b * block_bytes``."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def weights_fingerprint(self) -> str: ...

    def warm_up(self) -> None:
        """Compile and touch everything that the first request would otherwise wait for."""

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile what a request with these settings needs: its grammar. From any thread; may take long.

        Raises InvalidInputError if the request cannot be served; WorkerUnavailableError if nothing can be compiled now,
        or ``shutdown`` has begun. A grammar that was not prepared is compiled when its request enters.
        """

    def execute(self, work: SchedulerOutput) -> ModelOutput: ...

    def check(self) -> None:
        """Raise if no step could run any more, for example because a rank process has ended.

        Called from time to time while there is nothing to compute. Cheap.
        """

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """``core.checksums.unit_checksums`` of each block, one after the other, in the order given.

        From any thread, also during ``execute``, for blocks that are not written meanwhile.
        """

    def copy_blocks(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy each block to another one, between two steps. When it returns the bytes are there."""

    def shutdown(self) -> None: ...


# -- what a step tells the worker ------------------------------------------------------------------------------------


class KvLoad(msgspec.Struct, frozen=True):
    """Prefill side: read these blocks from the decode worker before computing (its prefix hits beyond ours).

    ``block_ids[i]`` is our block for the request's block number ``first_block + i``.
    """

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]


class HandoffChunk(msgspec.Struct, frozen=True):
    """Prefill side: these blocks are computed; write them to the decode worker (skip those that it holds).

    ``last`` comes with the first token (``first_output``), unless the prompt's tail is left out; the request is then
    PREFILL_SENDING until ``sending_finished``. The last block of the last chunk may be partly filled.
    """

    request_id: str
    first_block: int
    block_ids: tuple[int, ...]
    last: bool
    first_output: TokenOutput | None = None
    """The first token as a frontend may be told of it: with logprobs, prefix hit, and an end if it is the last."""
    kv_transfer_params: bytes | None = None
    """Only of an engine that moves KV itself, and only of the last chunk, which has no blocks: what the decode worker's
    engine needs to get the KV, as a JSON object. A first token is optional then."""

    @property
    def token_id(self) -> int | None:
        return None if self.first_output is None else self.first_output.token_ids[0]

    @property
    def logprobs(self) -> PositionLogprobs | None:
        logprobs = None if self.first_output is None else self.first_output.logprobs
        return logprobs[0] if logprobs else None


class KeptBlocks(msgspec.Struct, frozen=True):
    """Prefill side: the KV of a computed hand-off now lies in ``block_ids`` of the holding area; None: it stays where
    it is."""

    request_id: str
    block_ids: tuple[int, ...] | None


class StepOutput(msgspec.Struct):
    """Everything that one step produced."""

    outputs: list[TokenOutput] = []
    remote_prefills: list[RemotePrefillRequest] = []
    """Decode side: their requests are REMOTE_PREFILLING, and their blocks are lent to a hand-off as loan 1. The seed in
    ``sampling`` is the one in force."""
    closed_handoffs: list[HandoffId] = []
    """Decode side: hand-offs whose requests have ended by themselves."""
    kv_loads: list[KvLoad] = []
    handoff_chunks: list[HandoffChunk] = []
    kept_blocks: list[KeptBlocks] = []
    """Prefill side: the answers to ``keep_blocks``."""
    fetched_handoffs: list[tuple[HandoffId, bool]] = []
    """Decode side, of an engine that moves KV itself: the fetches that have ended, and whether the KV has arrived."""
    marks: list[tuple[str, tuple[float, ...]]] = []
    """By request id, as ``marks.recorder`` has them: what an engine that does not schedule hears of its requests. A
    request without a listener has none."""
    kv_events: list[KvEvent] = []
    load: LoadMetrics | None = None
    """The load, if a new sample is due."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to carry out."""
        return self == _NOTHING


_NOTHING = StepOutput()
