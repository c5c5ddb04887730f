"""The scheduler half: which KV a step copies. Pure; vLLM's requests are known by attribute.

    load    num_to_load ──> allocated ──> plan().loads         once; a request that is preempted later computes its KV
    save    allocated ──> plan().saves, step by step           as far as the step computes the prompt

Staging blocks are of the size of vLLM's, and a block is copied whole. vLLM has a block table for each group of layers,
with ``NULL_BLOCK`` for blocks that the group needs no more: those outside of its window, and states before the last.
Copies may end after their step: vLLM keeps the
blocks of a finished request until the worker halves have saved them, and those of a preempted one are protected in the
next step (``Copies.frees_blocks``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvrelay.engines.connector.terms import StagedKv, StagingPlace, decode_request
from kvrelay.errors import InvalidInputError

_log = logging.getLogger(__name__)

NULL_BLOCK = 0
"""vLLM's block that no request has."""

Groups = Sequence[Sequence[int]]
"""vLLM's blocks of a request, by group of layers."""


class VllmRequest(Protocol):
    """The part of vLLM's Request that is read."""

    request_id: str
    num_computed_tokens: int
    num_tokens: int
    kv_transfer_params: Mapping[str, Any] | None


class Copy(msgspec.Struct, frozen=True):
    """``staged[i]`` and ``paged[group][i]``, in the staging pool and in vLLM, are the same block of a request. After it
    ``num_blocks`` of the request are copied, from the first."""

    request_id: str
    staged: tuple[int, ...]
    paged: tuple[tuple[int, ...], ...]
    ticket: int = 0
    num_blocks: int = 0


class Copies(msgspec.Struct, frozen=True):
    """Of one step. ``frees_blocks``: it may overwrite blocks that an earlier step's saves still read, because their
    request was preempted."""

    loads: tuple[Copy, ...] = ()
    saves: tuple[Copy, ...] = ()
    frees_blocks: bool = False


class _Saving(msgspec.Struct):
    request: VllmRequest
    staged: StagedKv
    num_blocks: int = 0
    """Saved ones, from the first, with those that are not moved."""


class SchedulerHalf:
    """One per vLLM engine, whose blocks are those of ``place``."""

    def __init__(self, place: StagingPlace) -> None:
        self._place = place
        self._block_size = place.layout.block_size
        self._has_states = place.layout.has_states
        self._loads: list[Copy] = []
        self._loaded: set[str] = set()
        """Requests whose load was planned. Its staging blocks may have another use by the time of a preemption."""
        self._saving: dict[str, _Saving] = {}
        self.num_lost = 0
        """Requests whose KV has come in vain: vLLM no longer has the blocks that were not moved."""

    def __repr__(self) -> str:
        return f"SchedulerHalf({len(self._saving)} requests being saved, {len(self._loaded)} loaded)"

    def num_to_load(self, request: VllmRequest, num_computed: int) -> int:
        """Tokens to load after the first ``num_computed``, which vLLM has in its own cache: whole blocks."""
        staged = self._staged(request)
        if staged is None or staged.op != "load" or request.request_id in self._loaded:
            return 0
        if num_computed < staged.first_block * self._block_size:
            # What lies between was evicted: the prompt is computed here.
            self.num_lost += 1
            self._loaded.add(request.request_id)
            _log.warning(
                "request %s: blocks that vLLM had were evicted before the rest came; its prompt is computed here",
                request.request_id,
            )
            return 0
        return max(0, self._num_loadable(staged, request) - num_computed)

    def _num_loadable(self, staged: StagedKv, request: VllmRequest) -> int:
        """The last token is computed here in any case: so vLLM keeps the window before it. A state that has seen it is
        of no use, so the prompt is computed here then."""
        if staged.num_tokens < request.num_tokens:
            return staged.num_tokens
        return 0 if self._has_states else request.num_tokens - 1

    def allocated(self, request: VllmRequest, block_ids: Groups, num_external: int) -> None:
        """The request has vLLM's blocks ``block_ids``. ``num_external``: what ``num_to_load`` said, if it is to be
        loaded now."""
        staged = self._staged(request)
        if staged is None:
            return
        if staged.op == "save":
            self._saving.setdefault(request.request_id, _Saving(request, staged, staged.first_block))
        elif num_external > 0:
            self._loaded.add(request.request_id)
            num_tokens = self._num_loadable(staged, request)
            end = -(-num_tokens // self._block_size)
            copied = slice((num_tokens - num_external) // self._block_size, end)
            paged = part_of(block_ids, copied)
            self._loads.append(Copy(request.request_id, staged.block_ids[copied], paged, staged.ticket, end))

    def plan(
        self, num_scheduled: Mapping[str, int], block_tables: Callable[[str], Groups], preempted: Collection[str] = ()
    ) -> Copies:
        """The copies of a step that computes ``num_scheduled[request_id]`` tokens of each of its requests, and that may
        overwrite the blocks of ``preempted`` ones."""
        saves = []
        for request_id in self._saving.keys() & num_scheduled.keys():
            saving = self._saving[request_id]
            num_tokens = saving.request.num_computed_tokens + num_scheduled[request_id]
            end = num_tokens // self._block_size
            if num_tokens >= saving.staged.num_tokens:
                end = len(saving.staged.block_ids)
            if end > saving.num_blocks:
                copied = slice(saving.num_blocks, end)
                paged = part_of(block_tables(request_id), copied)
                saves.append(Copy(request_id, saving.staged.block_ids[copied], paged, saving.staged.ticket, end))
                saving.num_blocks = end
        loads, self._loads = self._loads, []
        return Copies(tuple(loads), tuple(saves), frees_blocks=not self._saving.keys().isdisjoint(preempted))

    def finished(self, request_id: str) -> bool:
        """The request has ended, in whatever way. Whether its blocks may not be freed before every rank has said that
        it has saved them."""
        self._loaded.discard(request_id)
        saving = self._saving.pop(request_id, None)
        return saving is not None and saving.num_blocks > saving.staged.first_block

    def _staged(self, request: VllmRequest) -> StagedKv | None:
        try:
            return decode_request(request.kv_transfer_params, self._place)
        except InvalidInputError as exc:
            # Its KV is computed here, and not saved.
            _log.warning("request %s: %s", request.request_id, exc.message)
            return None


def part_of(groups: Groups, blocks: slice) -> tuple[tuple[int, ...], ...]:
    """These blocks of each group."""
    return tuple(tuple(block_ids[blocks]) for block_ids in groups)
