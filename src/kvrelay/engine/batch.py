"""The sequences that hold a slot, and the arrays that a step sends to the executor.

It owns the slots, the order of rows, and the record of which slots the executor knows. It does not decide which
sequences run. Arrays are rebuilt only when the set of decoding sequences changes, so a steady decode step costs no
Python per sequence here.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView

import numpy as np

from kvrelay.engine.request import Request
from kvrelay.engine.step import NewSequence, SchedulerOutput

_EMPTY = np.empty(0, dtype=np.int32)
_NO_ROWS = (_EMPTY, _EMPTY, np.empty(0, dtype=np.bool_))
_NO_BLOCKS = (_EMPTY, _EMPTY, _EMPTY)


class Batch:
    """Slots and rows. A sequence is either *prefilling* or *decoding*; both are kept in order of entry."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots - 1, -1, -1))
        self._decoding: dict[Request, None] = {}
        self._prefilling: dict[Request, None] = {}
        self._entering: dict[Request, None] = {}
        self._released: list[int] = []
        self._new_blocks: list[tuple[int, int, int]] = []
        self._decode_rows: list[Request] | None = None
        self._decode_arrays = _NO_ROWS
        """Their slots, numbers of tokens, and which are sampled."""
        self._ones, self._all_true = np.ones(num_slots, dtype=np.int32), np.ones(num_slots, dtype=np.bool_)
        self._step = 0

    def __len__(self) -> int:
        return self._num_slots - len(self._free_slots)

    def __iter__(self) -> Iterator[Request]:
        yield from self._decoding
        yield from self._prefilling

    @property
    def num_decoding(self) -> int:
        return len(self._decoding)

    @property
    def prefilling(self) -> KeysView[Request]:
        return self._prefilling.keys()

    def enter(self, request: Request, *, decoding: bool) -> None:
        """Give ``request`` a slot; the next step announces it to the executor."""
        request.slot = self._free_slots.pop()
        self._entering[request] = None
        if decoding:
            self._add_decoding(request)
        else:
            self._prefilling[request] = None

    def start_decoding(self, request: Request) -> None:
        """The prefill of ``request`` is complete."""
        del self._prefilling[request]
        self._add_decoding(request)

    def leave(self, request: Request) -> None:
        """Take the slot of ``request`` back."""
        if request in self._decoding:
            del self._decoding[request]
            self._decode_rows = None
        else:
            del self._prefilling[request]
        if request in self._entering:
            del self._entering[request]
        else:
            self._released.append(request.slot)
        if self._new_blocks:
            # Another sequence may get the slot in the same step: these blocks are not for that sequence.
            self._new_blocks = [block for block in self._new_blocks if block[0] != request.slot]
        self._free_slots.append(request.slot)
        request.slot = -1

    def add_block(self, request: Request, block_id: int) -> None:
        """Append a block to the table of ``request``."""
        if request not in self._entering:
            self._new_blocks.append((request.slot, len(request.block_ids), block_id))
        request.block_ids.append(block_id)

    def decode_rows(self) -> list[Request]:
        """Decoding sequences in row order. Later changes of the batch do not change the returned list."""
        if self._decode_rows is None:
            self._decode_rows = list(self._decoding)
            slots, count = [request.slot for request in self._decode_rows], len(self._decode_rows)
            self._decode_arrays = np.array(slots, dtype=np.int32), self._ones[:count], self._all_true[:count]
        return self._decode_rows

    def build(self, decodes: list[Request], chunks: list[tuple[Request, int]]) -> SchedulerOutput:
        """The step's work: ``decodes`` (all of ``decode_rows`` or none), then ``chunks`` of the given numbers of
        tokens."""
        slots, num_tokens, samples = self._decode_arrays if decodes else _NO_ROWS
        if chunks:
            slots = np.concatenate([slots, np.array([request.slot for request, _ in chunks], dtype=np.int32)])
            num_tokens = np.concatenate([num_tokens, np.array([count for _, count in chunks], dtype=np.int32)])
            ends = [count == request.num_missing_tokens and not request.is_prefill_only for request, count in chunks]
            samples = np.concatenate([samples, np.array(ends, dtype=np.bool_)])
        blocks = tuple(np.array(self._new_blocks, dtype=np.int32).T) if self._new_blocks else _NO_BLOCKS
        self._step += 1
        output = SchedulerOutput(
            step=self._step,
            new_seqs=tuple(map(_new_sequence, self._entering)) if self._entering else (),
            released_slots=tuple(self._released),
            slots=slots,
            num_tokens=num_tokens,
            samples=samples,
            block_slots=blocks[0],
            block_indices=blocks[1],
            block_ids=blocks[2],
        )
        self._entering.clear()
        self._released.clear()
        self._new_blocks.clear()
        return output

    def _add_decoding(self, request: Request) -> None:
        self._decoding[request] = None
        self._decode_rows = None


def _new_sequence(request: Request) -> NewSequence:
    return NewSequence(
        slot=request.slot,
        request_id=request.request_id,
        token_ids=request.packed()[:],
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed_tokens=request.num_computed_tokens,
        block_ids=tuple(request.block_ids),
        sampling=request.sampling,
        seed=request.seed,
    )
