"""The worker half: copies blocks between the staging pool and vLLM's paged KV.

    staging pool, shared memory     [num_blocks][ region: layer, head, *interior ]...     of the whole model
    vLLM's paged KV, per layer      [num_blocks, head, *interior]            with any strides, of this rank; or
                                    [num_blocks * parts, head, ...]          if its attention has smaller blocks

The interior is [token, K|V * head_dim] by its shape. Its order of values is the business of vLLM's attention: the
CPU's, for example, packs the keys of all tokens of a block. So a head's part of a block is copied whole, and only
between equal vLLMs. A latent (MLA) is one head, whose interior is [token, latent]; so is a recurrent state, with
[1, bytes]. Each layer has the block table of its group in vLLM; of what a group has no block, nothing is copied.

Each rank copies its own layers (pipeline parallelism) and heads (tensor parallelism), all of them at once. So the two
sides of a hand-off may have any numbers of ranks: the pools between them are alike.

Copies run on a stream of their own, and what may run at once is ordered by events (``device``):

    saves of step n        after its forward pass
    loads of step n        after the forward passes before it, which may still write to those blocks
    forward pass           after earlier saves, if it may overwrite what they read

A rank reports each copy by itself when it is complete: blocks of a chunk leave while the next chunk is computed. A long
copy is reported in parts, so that its first blocks leave while the rest is copied.
"""

from __future__ import annotations

import logging
import mmap
import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.device import Device, Event, device_of
from kvrelay.engines.connector.scheduler_half import NULL_BLOCK, Copies, Copy, Groups, part_of
from kvrelay.engines.connector.terms import CopyKind, Report, StagingPlace, encode_report
from kvrelay.errors import ConfigError

_log = logging.getLogger(__name__)

BUFFER_BYTES = 64 * 2**20
"""Memory of the device through which a part of a copy goes, at most."""
LATENT_DIMS = 3
"""Of vLLM's KV with latents: [num_blocks, token, latent]."""


class RankPart(NamedTuple):
    """What a rank holds: ``num_layers`` layers, and ``num_heads`` KV heads from ``first_head`` on. ``saves``: no rank
    before it holds the same heads."""

    num_layers: int
    first_head: int
    num_heads: int
    saves: bool

    @staticmethod
    def of(layout: KVLayout, num_layers: int, tp_rank: int, tp_size: int) -> RankPart:
        """``layout``: of the whole model. As vLLM shares it out: if ranks outnumber heads, neighbours hold the same."""
        heads = layout.regions[0].num_slots
        first = tp_rank * heads // tp_size
        is_first = tp_rank == 0 or (tp_rank - 1) * heads // tp_size < first
        return RankPart(num_layers, first, max(1, heads // tp_size), is_first)


class _Flight(NamedTuple):
    """A part of a copy that may be under way, until ``event``."""

    event: Event
    request_id: str
    report: Report
    is_last: bool


class _Region:
    """This rank's part of the ``number``-th region: staging blocks, and the KV of its layers in vLLM."""

    def __init__(self, pool: torch.Tensor, layout: KVLayout, number: int, part: RankPart) -> None:
        """``pool``: [num_blocks, block_bytes] uint8."""
        (whole,) = layout.parts(number)
        region, size = layout.model[number], layout.block_size
        num_tokens = size if region.entry_tokens else 1
        values = region.num_entries(size) * region.entry_values // num_tokens
        self.dtype = getattr(torch, region.dtype)
        self.interior = (min(part.num_heads, region.num_heads), num_tokens, values)
        staged = pool[:, whole.offset : whole.offset + whole.num_bytes].view(self.dtype)
        staged = staged.view(len(pool), region.num_layers, region.num_heads, num_tokens, values)
        self.blocks = staged[:, :, part.first_head : part.first_head + part.num_heads]
        """[num_blocks, layer, *interior]"""
        self.layers: list[tuple[torch.Tensor, int]] = []
        """In their order in the model: vLLM's KV, and the group whose block table it has."""

    def whole_blocks(self, name: str, cache: torch.Tensor) -> torch.Tensor:
        """Raises ConfigError for another shape than the staging pool is made for."""
        blocks = _whole_blocks(cache.view(torch.uint8) if cache.element_size() == 1 else cache, self.interior[1])
        shape = (blocks.shape[1], blocks.shape[2:-1].numel(), blocks.shape[-1])
        if shape != self.interior or blocks.dtype != self.dtype:
            raise ConfigError(
                f"vLLM's KV of {name} is {tuple(cache.shape)} {cache.dtype}, "
                f"not (blocks, *{self.interior}) {self.dtype}"
            )
        return blocks

    def register(self, found: Mapping[int, tuple[torch.Tensor, int]]) -> None:
        """By place in the region. Without layers of it on this rank nothing is copied."""
        self.layers = [found[place] for place in sorted(found)]
        first = min(found, default=0)
        self.blocks = self.blocks[:, first : first + len(found)]

    def runs(self, staged: Sequence[int]) -> Iterator[tuple[torch.Tensor, slice]]:
        """The rank's part of staging blocks that are in a row, [block, layer, *interior], and where they are in
        ``staged``."""
        first = 0
        for number in range(1, len(staged) + 1):
            if number == len(staged) or staged[number] != staged[number - 1] + 1:
                yield self.blocks[staged[first] : staged[number - 1] + 1], slice(first, number)
                first = number


class _Table(NamedTuple):
    """The blocks of a copy that a group has: in vLLM, and their numbers within the copy."""

    paged: torch.Tensor
    rows: torch.Tensor | slice


Watch = Callable[[Event, Callable[[], None]], None]
"""Calls a function when an event is done, in the order of the events, on a thread of its own."""


class WorkerHalf:
    """One per vLLM worker, whose part of the model is ``part``, the ``rank``-th of all.

    In each step, on vLLM's thread: ``begin``, the forward pass, ``load``, ``save``, then ``take_loaded`` and
    ``take_saved``. Raises ConfigError for a pool at ``place`` that cannot be mapped.
    """

    def __init__(
        self,
        place: StagingPlace,
        part: RankPart,
        rank: int = 0,
        device: Device | None = None,
        watch: Watch | None = None,
    ) -> None:
        layout = place.layout
        self._part = part
        self._rank = rank
        self._places = place.places
        self._pool = _map(place).view(place.num_blocks, layout.block_bytes)
        self._regions = [_Region(self._pool, layout, number, part) for number in range(len(layout.regions))]
        self._frees_early = layout.has_states or any(region.window for region in layout.model)
        """Whether vLLM frees blocks of a request that is being computed."""
        self._device = device
        self._watch = watch or CompletionThread().when_done
        self._reports = os.open(place.reports, os.O_WRONLY | os.O_CLOEXEC) if place.reports else -1
        self._before: Event | None = None
        """The moment before this step's forward pass, if it loads."""
        self._last_save: Event | None = None
        self._lock = threading.Lock()
        self._flights: deque[_Flight] = deque()
        self._loaded: set[str] = set()
        self._saving: Counter[str] = Counter()
        """Requests with saves, until vLLM may free their blocks; and how many are under way."""
        self._finished: set[str] = set()
        """Those of them that have ended."""
        self.num_copies = self.num_bytes = 0
        """Between the staging pool and a buffer; bytes from and to the pool."""

    def register(self, caches: Mapping[str, torch.Tensor], groups: Mapping[str, int] | None = None) -> None:
        """vLLM's KV by layer name, and the number of its group. Raises ConfigError for another shape than the staging
        pool is made for."""
        found: list[dict[int, tuple[torch.Tensor, int]]] = [{} for _ in self._regions]
        for name, cache in caches.items():
            number, place = self._places.get(_layer_number(name), (0, -1))
            if place < 0 or place in found[number]:
                raise ConfigError(f"vLLM has KV of {name}: a layer twice, or none of {len(self._places)}")
            blocks = self._regions[number].whole_blocks(name, cache)
            found[number][place] = blocks, 0 if groups is None else groups[name]
        is_in_a_row = all(max(some) - min(some) < len(some) for some in found if some)
        if len(caches) != self._part.num_layers or not is_in_a_row:
            raise ConfigError(f"vLLM has KV of {len(caches)} layers, not of {self._part.num_layers} in a row")
        for region, some in zip(self._regions, found, strict=True):
            region.register(some)
        if self._device is None:
            self._device = device_of(next(iter(caches.values())))
        self._device.pin(self._pool)

    # -- a step -------------------------------------------------------------------------------------------------------

    def begin(self, copies: Copies) -> None:
        """Before the forward pass."""
        device = self._on_device
        if self._last_save is not None and (copies.frees_blocks or self._frees_early):
            device.compute.wait(self._last_save)
        self._before = device.compute.record() if copies.loads else None

    def load(self, copies: Copies) -> None:
        """Begin the step's loads."""
        if copies.loads:
            # A vLLM that does not say when a step begins makes them wait for its forward pass, too.
            self._on_device.copies.wait(self._before or self._on_device.compute.record())
        self._before = None
        for copy in copies.loads:
            self._copy(copy, CopyKind.LOAD, self._load_blocks)

    def save(self, copies: Copies) -> None:
        """Begin the step's saves, after its forward pass."""
        if not copies.saves:
            return
        device = self._on_device
        if self._part.saves:
            device.copies.wait(device.compute.record())
        for copy in copies.saves:
            with self._lock:
                self._saving[copy.request_id] += 1
            self._copy(copy, CopyKind.SAVE, self._save_blocks if self._part.saves else None)
        self._last_save = device.copies.record()

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call."""
        with self._lock:
            loaded, self._loaded = self._loaded, set()
        return loaded

    def take_saved(self, finished: Collection[str]) -> set[str]:
        """Requests whose blocks may be freed, of those that have ended: ``finished`` ones, and others before."""
        with self._lock:
            self._finished |= self._saving.keys() & set(finished)
            saved = {request_id for request_id in self._finished if not self._saving[request_id]}
            self._finished -= saved
            for request_id in saved:
                del self._saving[request_id]
        return saved

    def drain(self) -> None:
        """Return when no copy is under way."""
        with self._lock:
            flights = list(self._flights)
        for flight in flights:
            flight.event.wait()

    # -- copies -------------------------------------------------------------------------------------------------------

    @property
    def _on_device(self) -> Device:
        assert self._device is not None, "vLLM has not told its KV"
        return self._device

    def _copy(self, copy: Copy, kind: CopyKind, move: Callable[[Sequence[int], Groups], None] | None) -> None:
        """Give it to the copy stream, in parts that fit the buffer. ``move`` None: nothing of it is this rank's."""
        bytes_per_block = sum(region.blocks[0].nbytes for region in self._regions)
        num_all = len(copy.staged)
        size = num_all if move is None else max(1, BUFFER_BYTES // bytes_per_block)
        for first in range(0, num_all, size):
            part = slice(first, min(first + size, num_all))
            began_s, num_bytes = time.monotonic(), 0 if move is None else (part.stop - first) * bytes_per_block
            if move is not None:
                self._on_device.copies.run(partial(move, copy.staged[part], part_of(copy.paged, part)))
            self.num_bytes += num_bytes
            num_blocks = copy.num_blocks - (num_all - part.stop)
            report = Report(copy.ticket, self._rank, kind, num_blocks, num_bytes, began_s, 0.0)
            self._submitted(_Flight(self._on_device.copies.record(), copy.request_id, report, part.stop == num_all))

    def _submitted(self, flight: _Flight) -> None:
        """Hear of its end."""
        with self._lock:
            self._flights.append(flight)
        is_done = flight.event.is_done()
        if is_done:
            self._ended(flight)

        def seen() -> None:
            if not is_done:
                self._ended(flight)
            self._tell(flight.report)

        # A report may have to wait for its reader, so it is not written in a step.
        self._watch(flight.event, seen)

    def _load_blocks(self, staged: Sequence[int], paged: Groups) -> None:
        for region in self._regions:
            near = self._near(region, staged)
            for piece, row in self._pieces(region, staged):
                near[0][0][row].copy_(piece, non_blocking=True)
                self.num_copies += 1
            for blocks, places in near:
                tables = self._tables(part_of(paged, places))
                for layer, (cache, group) in enumerate(region.layers):
                    index, rows = tables[group]
                    cache.index_copy_(0, index, blocks[rows, layer].view(-1, *cache.shape[1:]))

    def _save_blocks(self, staged: Sequence[int], paged: Groups) -> None:
        for region in self._regions:
            near = self._near(region, staged)
            for blocks, places in near:
                tables = self._tables(part_of(paged, places))
                for layer, (cache, group) in enumerate(region.layers):
                    index, rows = tables[group]
                    if isinstance(rows, slice):
                        torch.index_select(cache, 0, index, out=blocks[:, layer].view(-1, *cache.shape[1:]))
                    else:
                        blocks[:, layer] = 0  # no bytes of another request
                        blocks[rows, layer] = cache[index].reshape(-1, *region.interior)
            for piece, row in self._pieces(region, staged):
                piece.copy_(near[0][0][row], non_blocking=True)
                self.num_copies += 1

    def _tables(self, paged: Groups) -> list[_Table]:
        """Of each group."""
        index, tables = self._on_device.index, []
        for block_ids in paged:
            rows = [row for row, block_id in enumerate(block_ids) if block_id != NULL_BLOCK]
            has_all = len(rows) == len(block_ids)
            tables.append(_Table(index([block_ids[row] for row in rows]), slice(None) if has_all else index(rows)))
        return tables

    def _near(self, region: _Region, staged: Sequence[int]) -> list[tuple[torch.Tensor, slice]]:
        """Memory for KV of these blocks beside vLLM's, [block, layer, *interior], and their places in ``staged``: in
        host memory the pool itself, elsewhere a buffer."""
        if self._on_device.is_host:
            return list(region.runs(staged))
        shape = (len(staged), *region.blocks.shape[1:])
        device = next((cache.device for cache, _ in region.layers), None)
        return [(torch.empty(shape, dtype=region.dtype, device=device), slice(None))]

    def _pieces(self, region: _Region, staged: Sequence[int]) -> Iterator[tuple[torch.Tensor, tuple[int | slice, ...]]]:
        """The rank's part of the staging blocks in pieces, with the index of each into a buffer of these blocks; none
        if they need no buffer.

        A piece lies in one stretch on both sides, because only such a copy needs no synchronization: all blocks in a
        row if the rank has the whole model in one region, a block if it has all heads, and else a layer of a block.
        """
        for run, row in () if self._on_device.is_host else region.runs(staged):
            if run.is_contiguous():
                yield run, (row,)
                continue
            for block, part in enumerate(run, start=row.start):
                if part.is_contiguous():
                    yield part, (block,)
                else:
                    yield from ((layer, (block, place)) for place, layer in enumerate(part))

    # -- what has ended -----------------------------------------------------------------------------------------------

    def _ended(self, flight: _Flight) -> None:
        """In the order of the flights. A copy ends with its last part."""
        with self._lock:
            self._flights.remove(flight)
            if flight.is_last and flight.report.kind is CopyKind.LOAD:
                self._loaded.add(flight.request_id)
            elif flight.is_last:
                self._saving[flight.request_id] -= 1

    def _tell(self, report: Report) -> None:
        if self._reports >= 0:
            os.write(self._reports, encode_report(report._replace(ended_s=time.monotonic())))


class CompletionThread:
    """A ``Watch``. Its thread begins with the first event."""

    def __init__(self) -> None:
        self._events: queue.SimpleQueue[tuple[Event, Callable[[], None]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def when_done(self, event: Event, then: Callable[[], None]) -> None:
        """``then`` must not block for long: later events wait for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvrelay-copies", daemon=True)
            self._thread.start()
        self._events.put((event, then))

    def _run(self) -> None:
        while True:
            event, then = self._events.get()
            try:
                event.wait()
                then()
            except BrokenPipeError:
                return  # the worker has closed the staging pool
            except Exception:  # noqa: BLE001 - hand-offs then end by their deadlines
                _log.exception("kvrelay's connector does not hear of complete copies any more")
                return


def _whole_blocks(cache: torch.Tensor, size: int) -> torch.Tensor:
    """vLLM's KV of a layer as [num_blocks, head, *tokens, values]. Its attention may have smaller blocks than vLLM's of
    ``size`` tokens, which then are several in a row."""
    blocks = cache.unsqueeze(1) if cache.dim() == LATENT_DIMS else cache
    num_parts = size // blocks.shape[2] if blocks.dim() > LATENT_DIMS and blocks.shape[2] else 1
    if num_parts > 1 and len(blocks) % num_parts == 0:
        return blocks.view(-1, num_parts, *blocks.shape[1:]).transpose(1, 2)
    return blocks


def _layer_number(name: str) -> int:
    """11 of ``model.layers.11.self_attn.attn``; -1 if there is none."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), -1)


def _map(place: StagingPlace) -> torch.Tensor:
    num_bytes = place.num_blocks * place.layout.block_bytes
    try:
        fd = os.open(place.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < num_bytes:
                raise ConfigError(f"the staging pool at {place.path} is smaller than {num_bytes} bytes")
            memory = mmap.mmap(fd, num_bytes)
        finally:
            os.close(fd)
    except OSError as exc:
        raise ConfigError(f"the staging pool at {place.path} cannot be mapped: {exc.strerror}") from exc
    return torch.frombuffer(memory, dtype=torch.uint8)
