"""The worker's contract with an engine: requests in; tokens, cache events and load out; and hand-offs of KV.

An engine has two halves, like a KV connector of vLLM. What only some engines can do are capabilities of the first half:
``HandsOver``, ``MovesKv`` and ``Schedules``. An engine without one has None in its place, and no methods for it.

``Engine`` is the scheduler half. Its methods run in *callbacks*: functions that the host calls between two steps, so
that they read and change a consistent state. ``EngineHost`` is the worker half and the engine's life: memory, facts,
threads. Nothing here says that blocks, hashes or the step loop are kvrelay's: ``EngineCore`` behind
``worker.EngineThread`` is one implementation.

    worker ── post(callback) ──> EngineHost ── callback(engine) ──> Engine    between two steps
           <── on_step(StepOutput) ── EngineHost                              on the engine's thread, after each step

Hand-offs of an engine that ``HandsOver``, decode side. Which KV is missing, where may it be written, when may the
blocks be freed?

    add_request(REMOTE) ... StepOutput.remote_prefills    the request waits; its blocks are lent as loan 1
    lend_fresh                                            another loan, for a later claimant
    resume_handoff / compute_handoff_here                 the KV has arrived / will not arrive: the request continues
    end_loan                                              no peer touches the blocks of this loan any more
    StepOutput.closed_handoffs                            the request ended by itself; its loans are still to be ended

Hand-offs, prefill side. Where may KV be read from, when may the blocks be freed?

    add_request(HANDOFF) ... StepOutput.kv_loads          read these blocks first; ``kv_loaded`` reports the result
    StepOutput.handoff_chunks                             these blocks are computed; the last chunk carries the token
    keep_blocks ... StepOutput.kept_blocks                pull: where the computed KV lies from now on
    sending_finished                                      no transfer touches the blocks any more: free them

An engine that ``MovesKv`` moves the KV itself, as two vLLM servers do with its NIXL connector. It lends no
blocks. Its hand-offs carry what the prefill worker's engine says to the decode worker's, ``kv_transfer_params``:

    decode side    add_request(REMOTE) ... StepOutput.remote_prefills    the request waits; there are no blocks
                   fetch_handoff ... StepOutput.fetched_handoffs         get the KV and continue; it has come, or not
                   compute_handoff_here                                  after a failed fetch, or if no KV will come
                   discard_kv                                            a prefill worker has KV that no one fetches
    prefill side   add_request(HANDOFF) ... StepOutput.handoff_chunks    one, with kv_transfer_params
                   sending_finished / abort                              the KV was fetched / it will not be: free it

The engine may neither free nor reuse lent blocks, even if the request ends: ``kvrelay/handoff`` decides when a loan
ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

import msgspec

from kvrelay.core.adapters import AdapterEntry
from kvrelay.core.events import LoadMetrics
from kvrelay.core.handoff import HandoffId
from kvrelay.core.layout import KVLayout, MemoryRegion
from kvrelay.core.logprobs import PositionLogprobs
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.step_cost import CostSource
from kvrelay.engine.kv_source import SourceBeyond
from kvrelay.engine.limits import PendingArrivals
from kvrelay.engine.progress import Progress
from kvrelay.engine.request import Request
from kvrelay.engine.stats import EngineStats
from kvrelay.engine.step import StepOutput
from kvrelay.errors import EngineDeadError

T = TypeVar("T")
OnStep = Callable[[StepOutput], None]
OnDead = Callable[[EngineDeadError], None]


class Engine(Protocol):
    """The scheduler half. Every method but ``check_room`` is called in a callback."""

    # -- requests -----------------------------------------------------------------------------------------------------

    def check_room(self, num_tokens: int, *, is_new: bool, ahead: PendingArrivals, tenant: str = "") -> None:
        """Raise OverloadedError if a request of ``num_tokens`` of this API key is above a limit now. From any thread,
        also during a step."""

    def num_cached_tokens(self, request: Request) -> int:
        """Tokens of this request's prompt whose KV need not be computed."""

    def add_request(self, request: Request) -> None:
        """Add ``request``. Raises InvalidInputError, PromptTooLongError, OverloadedError or EngineDeadError, and then
        changes nothing."""

    def abort(self, request_id: str) -> None:
        """End a request without an answer. Unknown ids are ignored."""

    def has_begun(self, request_id: str) -> bool:
        """Whether anything of this request is computed or loaded, or may be. Unknown ids have begun."""

    # -- capabilities: what not every engine can do -------------------------------------------------------------------

    @property
    def lends(self) -> HandsOver | None: ...

    @property
    def moves(self) -> MovesKv | None: ...

    @property
    def schedules(self) -> Schedules | None: ...

    # -- hand-offs ----------------------------------------------------------------------------------------------------

    def compute_handoff_here(self, handoff_id: HandoffId) -> None:
        """No KV will arrive: the request, if it still waits, is computed here in other blocks, or placed anew
        (``PlacementState.otherwise``)."""

    def keep_prefills_here(self) -> None:
        """No prefill worker is left: compute waiting remote prefills here."""

    def sending_finished(self, request_id: str) -> None:
        """No transfer touches the blocks of this hand-off any more. Unknown ids are ignored."""

    # -- what can be seen ---------------------------------------------------------------------------------------------

    def metrics(self) -> LoadMetrics: ...

    def cached_hashes(self) -> Sequence[int]:
        """Sequence hashes of every cached block."""

    def clear_cache(self) -> None:
        """Forget every cached prefix; running requests continue."""

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every block is free, in use or lent, and counts are true."""


class HandsOver(Protocol):
    """The blocks of an engine whose hand-offs have blocks: workers move the KV."""

    def resume_handoff(
        self, handoff_id: HandoffId, loan: int, token_id: int | None, logprobs: PositionLogprobs | None
    ) -> bool:
        """The blocks of ``loan`` hold the KV of the waiting request, and ``token_id`` is its first token. None: the
        tail of its prompt is missing (``KVLayout.tail_tokens``), and the first token with it.

        False: no request waits for it, or the token cannot be one; then the request is computed here.
        """

    def lend_fresh(self, handoff_id: HandoffId, loan: int) -> tuple[int, ...] | None:
        """Blocks for a later claimant, lent as ``loan``; None if no request waits or no blocks are free."""

    def end_loan(self, handoff_id: HandoffId, loan: int) -> None:
        """No peer touches the blocks of this loan any more. Raises KeyError: a loan ends once."""

    def writable_blocks(self) -> Mapping[tuple[HandoffId, int], tuple[int, ...]]:
        """The lent blocks that a peer may write to, by hand-off and loan. From any thread."""


class MovesKv(Protocol):
    """The fetches of an engine that moves the KV itself (``EngineFacts.moves_kv``)."""

    def fetch_handoff(self, handoff_id: HandoffId, kv_transfer_params: bytes) -> bool:
        """Get the KV of the waiting request, and continue it with a first token of its own.
        ``StepOutput.fetched_handoffs`` tells the end, exactly once. False: no request waits for it, and nothing
        follows."""

    def handoff_told(self, request_id: str) -> None:
        """The KV of this request has arrived, and how long the prefill worker computed it is known to the request's
        placement (``CostPlacement.prefill_took``). Unknown ids are ignored."""

    def discard_kv(self, kv_transfer_params: bytes) -> None:
        """No request will fetch this KV. Tell the engine that keeps it; tries once."""


class Schedules(Protocol):
    """The steps of an engine that schedules them itself, with reads of KV before them, and what becomes of it; its
    prefix cache is ours."""

    def set_exclusive_prefill(self, exclusive: bool) -> None:
        """Whether hand-off prefills run in steps of their own."""

    def kv_loaded(self, request_id: str, ok: bool, num_blocks: int = 0) -> None:
        """The read that a KvLoad asked for has ended. Unknown ids are ignored."""

    def add_source(self, source: SourceBeyond) -> None:
        """Prompts may also begin with what this has."""

    def lend_prefix(
        self, handoff_id: HandoffId, token_ids: Sequence[int], cache_salt: str | None
    ) -> tuple[int, ...] | None:
        """The cached blocks with which this prompt begins, lent as loan 1 to a peer that only reads. None: there are
        none, or none can be spared. ``HandsOver.end_loan`` ends the loan."""

    def session_paused(self, request_id: str, kind: str, within_s: float = 0.0, is_over: bool = False) -> None:
        """This request has ended, and its session does as ``SessionPaused`` says. Unknown ids are ignored."""

    def keep_blocks(self, request_id: str, block_ids: Sequence[int]) -> None:
        """The hand-off is computed, what a peer lacks lies in ``block_ids``, and no transfer touches them. If there is
        room, keep it in the holding area and free the pool's blocks. ``StepOutput.kept_blocks`` answers, exactly
        once."""


def require(capability: T | None) -> T:
    """A capability that the engine has, since it has produced what the caller now answers."""
    assert capability is not None, "the engine has no hand-offs of this kind"
    return capability


class EngineFacts(msgspec.Struct, frozen=True):
    """What does not change while an engine lives. Lengths in tokens. Without ``hands_over_kv`` no request of the engine
    is a hand-off, and peers never use its memory. With ``moves_kv`` hand-offs carry no blocks, and peers' engines get
    the KV from this engine without kvrelay. Without ``prefills_here`` the engine computes prompts for others
    or continues from KV that it gets, never both. ``step_costs``: where it knows the cost of its steps from; without it
    ``placement`` goes by thresholds. With ``has_open_cache`` its prefix cache lies in blocks that workers can lend and
    fill (``Schedules``). ``num_holding_blocks`` come after ``num_blocks`` in the engine's memory. ``adapter``: the
    adapter (LoRA) that every answer is computed with, by name (empty: none). ``adapters``: the ids of those that a
    request may ask for (``SamplingParams.adapter``) from the start on; with ``max_adapters`` the host is a
    ``LoadsAdapters``, and may have so many. ``moved``: with ``moves_kv``, the KV that moves, which is not that of
    ``kv_layout`` (None: not known)."""

    kv_layout: KVLayout
    num_blocks: int
    max_model_len: int
    vocab_size: int
    weights_fingerprint: str
    hands_over_kv: bool = True
    moves_kv: bool = False
    prefills_here: bool = True
    step_costs: CostSource = CostSource.MEASURED
    has_open_cache: bool = False
    num_holding_blocks: int = 0
    adapter: str = ""
    adapters: tuple[str, ...] = ()
    max_adapters: int = 0
    moved: KVLayout | None = None

    @property
    def token_bytes(self) -> int:
        """Of the KV of one token, when it moves; 0: not known."""
        moved = self.moved if self.moves_kv else self.kv_layout
        return 0 if moved is None else moved.bytes_per_token


class EngineHost(Protocol):
    """The worker half, and the engine's life: ``start`` once, ``close`` once."""

    @property
    def facts(self) -> EngineFacts: ...

    @property
    def kv_region(self) -> MemoryRegion:
        """The KV pool's memory, valid until ``close``; block b lies at ``address + b * block_bytes``."""

    @property
    def progress(self) -> Progress:
        """How long the engine's current turn has lasted. From any thread."""

    def start(self, on_step: OnStep, on_dead: OnDead, *, samples_load: bool = True) -> None:
        """Run. ``on_step`` is called on the engine's thread with what a step produced, in one part or two, and not
        after a step that produced nothing; ``on_dead`` once if the engine fails, after the output that fails its
        requests was delivered. With ``samples_load`` some outputs carry the load."""

    def post(self, callback: Callable[[Engine], object]) -> None:
        """Run ``callback`` before the next step; from any thread. Its exceptions are logged."""

    async def call(self, callback: Callable[[Engine], T]) -> T:
        """Run ``callback`` before the next step and return its result, or raise what it raised; EngineDeadError if the
        engine ends first."""

    def peek(self, read: Callable[[Engine], T]) -> T:
        """Run ``read`` at once on the caller's thread. During a step too, so ``read`` reads single numbers only."""

    def stats(self) -> EngineStats:
        """Counts and gauges, from any thread, without waiting for a step."""

    def prepare(self, sampling: SamplingParams) -> None:
        """Compile what a request with these settings needs. From any thread; may take long.

        Raises InvalidInputError if the request cannot be served, WorkerUnavailableError if another worker may do it.
        """

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        """``core.checksums.unit_checksums`` of each block, one after the other. From any thread, for blocks that no one
        writes to."""

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop after the current step and free everything. Idempotent. False if the thread did not end in time.

        A rank of a data-parallel group waits until all ranks are closed: their steps need it.
        """


@runtime_checkable
class LoadsAdapters(Protocol):
    """An EngineHost whose adapters (LoRA) come and go while it runs (``EngineFacts.max_adapters``)."""

    async def load_adapter(self, entry: AdapterEntry) -> None:
        """Requests may ask for it when this returns. Raises InvalidInputError for one that the engine cannot have."""

    def retire_adapter(self, adapter: str) -> None:
        """No new request will ask for this id. The engine forgets it when the last answer has ended that uses it,
        unless it is loaded again before."""
