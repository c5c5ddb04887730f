"""An executor without a model: a timing model, and a KV pool that detects lost, late and misplaced blocks.

It owns a real memory pool, so transports move its blocks like those of any executor. Position p of a sequence stores

    K[p] = token p        V[p] = h[p],   h[p] = h[p-1] * A + spread(token p)   (mod 2**32),   h[-1] = SEED

and the token after p is a function of h[p], read from the pool through the block table. So the answer depends on every
token before it, and ``mock_generate`` computes it without a pool. When a sequence enters, all its computed blocks
(prefix hits, transferred blocks) are verified; each decode verifies one more block, in turn, against what was written.
After a damaged block a sequence's answer has wrong tokens.

Decodes are computed one by one with Python's integers: an engine that takes no time has one to four in a step, and then
this takes a tenth of the time of array operations. Prefills are arrays. The process needs no torch.
"""

from __future__ import annotations

import mmap
import os
import time
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvrelay.config import EngineConfig, MockConfig, WorkerConfig
from kvrelay.core.checksums import unit_checksums
from kvrelay.core.layout import MemoryRegion, paged_kv
from kvrelay.core.logprobs import PositionLogprobs, TokenLogprob
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.holding import num_holding_blocks
from kvrelay.engine.step import NO_TOKEN, ModelOutput, NewSequence, SchedulerOutput
from kvrelay.errors import ConfigError
from kvrelay.executors.checkpoint_facts import checkpoint_facts
from kvrelay.executors.grammars import GrammarCompiler, GrammarMasks
from kvrelay.executors.host_memory import HostMemory, private_memory, require_host_memory

Uint32Array = npt.NDArray[np.uint32]

HANG_POLL_S = 0.05
DEFAULT_NUM_BLOCKS = 16384

_MASK = 2**32 - 1
_A = 0x9E3779B1
_SEED = 0x12345679
_SPREAD = 0x85EBCA6B
_MIX = 0xC2B2AE35
_STRETCH = 1024
"""Powers of A are kept for so many positions, or a multiple."""


class _Sequence:
    """A sequence in a slot. ``keys``: its known tokens; ``hashes``: those of the computed ones; ``blocks``: where its
    blocks begin in the pool, in cells; ``copies``: of full blocks that were checked, by number in the sequence."""

    __slots__ = ("blocks", "copies", "hashes", "is_damaged", "keys", "num_computed", "num_prompt", "sampling")

    def __init__(self, entered: NewSequence, block_cells: int) -> None:
        self.sampling = entered.sampling
        self.num_prompt = entered.num_prompt_tokens
        self.num_computed = entered.num_computed_tokens
        self.keys = array("I", entered.token_ids)
        self.hashes = array("I")
        if self.num_computed:
            self.hashes.frombytes(_hash_chain(_numbers(self.keys)[: self.num_computed], _SEED).tobytes())
        self.blocks = [block_id * block_cells for block_id in entered.block_ids]
        self.copies: dict[int, bytes] = {}
        self.is_damaged = False

    def keep_copy(self, number: int, size: int) -> bytes:
        """Of a full block of ``size`` positions, as it was written."""
        rows = slice(number * size, (number + 1) * size)
        copy = self.copies[number] = self.keys[rows].tobytes() + self.hashes[rows].tobytes()
        return copy


class MockExecutor:
    """Answers with ``mock_generate``'s tokens, in the time that ``MockConfig`` gives. See the module's docstring.

    ``sleep`` waits. End-of-sequence tokens are never generated, so answers have ``max_tokens`` tokens. ``spill_bytes``:
    as if the pool were on a device.
    """

    def __init__(
        self,
        config: EngineConfig,
        mock: MockConfig,
        *,
        vocab_size: int,
        eos_token_ids: tuple[int, ...] = (),
        max_model_len: int = 32768,
        tokenizer_file: Path = Path("tokenizer.json"),
        sleep: Callable[[float], None] = time.sleep,
        allocate: Callable[[int], mmap.mmap] | None = None,
        holding_bytes: int = 0,
        spill_bytes: int = 0,
    ) -> None:
        if vocab_size <= len(eos_token_ids):
            raise ConfigError("the vocabulary has no token besides the end of sequence", param="vocab_size")
        if not config.num_blocks and config.kv_cache_memory != "auto":
            raise ConfigError("the mock engine's pool is given by num_blocks", param="kv_cache_memory")
        self._mock = mock
        self._sleep = sleep
        self.vocab_size, self.weights_fingerprint = vocab_size, f"mock-{vocab_size}"
        self.eos_token_ids = tuple(sorted(eos_token_ids))
        self.max_model_len = min(max_model_len, config.max_model_len or max_model_len)
        self._block_size = config.block_size
        self.num_blocks = config.num_blocks or DEFAULT_NUM_BLOCKS
        self.kv_layout = paged_kv(1, 1, config.block_size, 1, "int32", tail_tokens=mock.tail_tokens)
        require_host_memory(self.num_blocks * self.kv_layout.block_bytes, config)
        self.num_holding_blocks = num_holding_blocks(holding_bytes, self.kv_layout.block_bytes, self.num_blocks)
        self.num_spill_blocks = num_holding_blocks(spill_bytes, self.kv_layout.block_bytes, self.num_blocks)
        num_all_blocks = self.num_blocks + self.num_holding_blocks + self.num_spill_blocks
        num_bytes = num_all_blocks * self.kv_layout.block_bytes
        self._memory = (allocate or private_memory)(num_bytes)
        self._all_cells = pool = np.frombuffer(self._memory, dtype=np.uint32)
        self.pool: Uint32Array = pool.reshape(num_all_blocks, 2, self._block_size)
        """As [block of pool or holding area, K or V, block_size]."""
        self._bytes = pool.view(np.uint8).reshape(num_all_blocks, self.kv_layout.block_bytes)
        num_registered = (self.num_blocks + self.num_holding_blocks) * self.kv_layout.block_bytes
        self.kv_region = MemoryRegion(pool.ctypes.data, num_registered)
        self._cells = memoryview(self._memory).cast("I")
        self._block_cells = 2 * self._block_size
        self._offsets = np.arange(self._block_size)
        self._sequences: dict[int, _Sequence] = {}
        """By slot."""
        self._grammars = GrammarMasks(GrammarCompiler(tokenizer_file, vocab_size, eos_token_ids), vocab_size)

    def __repr__(self) -> str:
        return f"MockExecutor({self.num_blocks} blocks of {self._block_size}, {len(self._sequences)} sequences)"

    def warm_up(self) -> None:
        """Touch the pool's pages, so that the first requests need not. Nothing is compiled."""
        self.pool[: self.num_blocks].fill(0)

    def shutdown(self) -> None:
        """The pool's memory is freed with its last reference, because a transport may still use it."""
        self._grammars.close()
        self._grammars.compiler.close()

    def check(self) -> None:
        """No process computes that could end by itself."""

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        for slot in work.released_slots:
            self._sequences.pop(slot, None)
            self._grammars.release(slot)
        for sequence in work.new_seqs:
            self._enter(sequence)
        if len(work.block_ids):
            for slot, block_id in zip(work.block_slots.tolist(), work.block_ids.tolist()):
                self._sequences[slot].blocks.append(block_id * self._block_cells)
        if not len(work.slots):
            return ModelOutput([])
        self._pass_time(work)
        return self._compute(work)

    def prepare(self, sampling: SamplingParams) -> None:
        if sampling.grammar is not None:
            self._grammars.compiler.compile(sampling.grammar)

    def checksum_blocks(self, block_ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(
            checksum for block_id in block_ids for checksum in unit_checksums(self._bytes[block_id], self.kv_layout)
        )

    def copy_blocks(self, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        self._bytes[list(target_ids)] = self._bytes[list(source_ids)]

    # -- the timing model ---------------------------------------------------------------------------------------------

    def _pass_time(self, work: SchedulerOutput) -> None:
        mock = self._mock
        while mock.hang_file and os.path.exists(f"{mock.hang_file}.{os.getpid()}"):
            time.sleep(HANG_POLL_S)
        if mock.speedup_ratio == 0:
            return
        seconds, num_decodes = 0.0, self._num_decodes(work)
        if num_decodes:
            seconds += mock.decode_base_s + mock.decode_seq_s * num_decodes
        num_prefilled = int(work.num_tokens[num_decodes:].sum())
        if num_prefilled:
            seconds += mock.prefill_base_s + mock.prefill_token_s * num_prefilled
        self._sleep(seconds / mock.speedup_ratio)

    def _num_decodes(self, work: SchedulerOutput) -> int:
        """Leading rows of one token that continue after the prompt."""
        (longer,) = (work.num_tokens != 1).nonzero()
        return int(longer[0]) if len(longer) else work.num_seqs

    # -- the arithmetic -----------------------------------------------------------------------------------------------

    def _enter(self, entered: NewSequence) -> None:
        sequence = self._sequences[entered.slot] = _Sequence(entered, self._block_cells)
        self._grammars.enter(entered.slot, entered.sampling, entered.token_ids[entered.num_prompt_tokens :])
        count = sequence.num_computed
        if count:
            blocks = self.pool[list(entered.block_ids[: -(-count // self._block_size)])]
            is_intact = (
                blocks[:, 0].tobytes()[: 4 * count] == sequence.keys[:count].tobytes()
                and blocks[:, 1].tobytes()[: 4 * count] == sequence.hashes.tobytes()
            )
            sequence.is_damaged = not is_intact

    def _compute(self, work: SchedulerOutput) -> ModelOutput:
        slots = work.slots.tolist()
        result = ModelOutput([])
        sampled: list[tuple[int, _Sequence]] = []
        outputs = result.token_ids
        for row, (slot, count, samples) in enumerate(zip(slots, work.num_tokens.tolist(), work.samples.tolist())):
            sequence = self._sequences[slot]
            if sequence.sampling.prompt_logprobs is not None and sequence.num_computed < sequence.num_prompt:
                result.prompt_logprobs[row] = self._prompt_logprobs(sequence, count)
            last = self._decode(sequence) if count == 1 else self._prefill(sequence, count)
            if samples:
                sampled.append((row, sequence))
                outputs.append(next_token(last, self.vocab_size, self.eos_token_ids, sequence.is_damaged))
        if self._grammars:
            rows = [row for row, _ in sampled]
            self._obey_grammars([slots[row] for row in rows], rows, result)
        for (row, sequence), token in zip(sampled, outputs):
            if token == NO_TOKEN:
                sequence.num_computed -= 1
                continue
            sequence.keys.append(token)
            if sequence.sampling.logprobs is not None:
                result.logprobs[row] = mock_logprobs(token, sequence.sampling.logprobs, self.vocab_size)
        return result

    def _obey_grammars(self, slots: list[int], rows: list[int], result: ModelOutput) -> None:
        """Replace tokens that a grammar forbids by one that it allows, or by NO_TOKEN if its mask is late, and add the
        failures. ``slots`` and ``rows``: of the tokens."""
        computing = self._grammars.begin(slots)
        if computing is None:
            return
        masks, token_ids = computing.result(), result.token_ids
        assert masks is not None  # no row guesses
        for number, forbidden in zip(masks.rows, masks.forbidden()):
            allowed = np.flatnonzero(~forbidden)
            if forbidden[token_ids[number]]:
                token_ids[number] = int(allowed[token_ids[number] % len(allowed)])
        for number in masks.late:
            token_ids[number] = NO_TOKEN
        self._grammars.advance(slots, token_ids)
        result.failures.update({rows[number]: reason for number, reason in masks.failures.items()})

    def _decode(self, sequence: _Sequence) -> int:
        """One position; returns its hash."""
        size, cells = self._block_size, self._cells
        position, blocks, hashes = sequence.num_computed, sequence.blocks, sequence.hashes
        index, offset = position // size, position % size
        cell = blocks[index] + offset
        before = cell + size - 1 if offset else blocks[index - 1] + 2 * size - 1
        previous = cells[before] if position else _SEED
        token = sequence.keys[position]
        last = (previous * _A + token * _SPREAD) & _MASK
        cells[cell] = token
        cells[cell + size] = last
        if position == len(hashes):
            hashes.append(last)  # else it has sat out the step before: the same again
        sequence.num_computed = position + 1
        if index:
            # One of the full blocks, a different one at each position.
            checked = position % index
            start = 4 * blocks[checked]
            written = sequence.copies.get(checked) or sequence.keep_copy(checked, size)
            if self._memory[start : start + 8 * size] != written:
                sequence.is_damaged = True
        return last

    def _prefill(self, sequence: _Sequence, count: int) -> int:
        """``count`` positions; returns the last one's hash."""
        size, first = self._block_size, sequence.num_computed
        before = sequence.blocks[(first - 1) // size] + size + (first - 1) % size if first else -1
        tokens = _numbers(sequence.keys[first : first + count])
        hashes = _hash_chain(tokens, self._cells[before] if first else _SEED)
        blocks = np.array(sequence.blocks[first // size : -(-(first + count) // size)])
        cells = (blocks[:, None] + self._offsets).ravel()[first % size :][:count]
        self._all_cells[cells] = tokens
        self._all_cells[cells + size] = hashes
        del sequence.hashes[first:]
        sequence.hashes.frombytes(hashes.tobytes())
        sequence.num_computed += count
        return int(hashes[-1])

    # -- invented logprobs ---------------------------------------------------------------------------------------------

    def _prompt_logprobs(self, sequence: _Sequence, count: int) -> list[PositionLogprobs]:
        """Those of the prompt's tokens among the next ``count``."""
        num_top, first = sequence.sampling.prompt_logprobs or 0, sequence.num_computed
        tokens = sequence.keys[max(first, 1) : min(first + count, sequence.num_prompt)]
        return [mock_logprobs(token, num_top, self.vocab_size) for token in tokens]


def from_settings(settings: WorkerConfig, memory: HostMemory) -> MockExecutor:
    """A MockExecutor with the vocabulary, end token and context length of a checkpoint; its weights are not read.

    Raises CheckpointError.
    """
    if settings.runner.num_ranks > 1:
        raise ConfigError("the mock engine has one rank; leave out --tp and --pp", param="tp")
    engine = settings.engine
    facts = checkpoint_facts(settings.model_path)
    return MockExecutor(
        engine,
        settings.mock,
        vocab_size=facts.vocab_size,
        eos_token_ids=facts.eos_token_ids,
        max_model_len=engine.max_model_len or facts.max_model_len,
        tokenizer_file=settings.model_path / "tokenizer.json",
        allocate=memory.allocate,
        holding_bytes=settings.holding_bytes,
    )


def mock_generate(
    prompt: Sequence[int], num_tokens: int, *, vocab_size: int, eos_token_ids: tuple[int, ...] = ()
) -> list[int]:
    """The tokens of a mock engine's answer to ``prompt``, computed without a pool."""
    last = int(_hash_chain(np.asarray(prompt, dtype=np.uint32), _SEED)[-1])
    eos_token_ids = tuple(sorted(eos_token_ids))
    answer = []
    for _ in range(num_tokens):
        token = next_token(last, vocab_size, eos_token_ids)
        answer.append(token)
        last = (last * _A + token * _SPREAD) & _MASK
    return answer


def next_token(last_hash: int, vocab_size: int, eos_token_ids: tuple[int, ...], is_damaged: bool = False) -> int:
    """The token after that hash: a wrong one if it ``is_damaged``, and never one of ``eos_token_ids`` (in order)."""
    mixed = (last_hash ^ last_hash >> 15 ^ is_damaged) * _MIX & _MASK
    token = (mixed ^ mixed >> 13) % (vocab_size - len(eos_token_ids))
    for eos in eos_token_ids:
        token += token >= eos
    return token


def mock_logprobs(token_id: int, num_top: int, vocab_size: int) -> PositionLogprobs:
    """The chosen token as the likeliest, followed by its neighbours in the vocabulary."""
    top = tuple(
        TokenLogprob((token_id + rank) % vocab_size, -0.5 - rank, rank + 1) for rank in range(min(num_top, vocab_size))
    )
    return PositionLogprobs(TokenLogprob(token_id, -0.5, 1), top)


def _numbers(words: array[int]) -> Uint32Array:
    """A view. While it lives the words cannot be resized."""
    return np.frombuffer(words, dtype=np.uint32)


def _hash_chain(tokens: Uint32Array, previous: int) -> Uint32Array:
    """h[i] = h[i-1] * A + tokens[i] * SPREAD for all i at once, with h[-1] = ``previous``.

    Since A is odd it has an inverse modulo 2**32, and h[i] = A**(i+1) * (previous + sum of SPREAD * t[j] / A**(j+1)).
    """
    powers, inverses = _powers(-(-len(tokens) // _STRETCH) * _STRETCH)
    sums: Uint32Array = np.add.accumulate(tokens * inverses[: len(tokens)], dtype=np.uint32)
    return powers[: len(tokens)] * (sums + np.uint32(previous))


@cache
def _powers(count: int) -> tuple[Uint32Array, Uint32Array]:
    """A**i, and SPREAD / A**i, for i from 1 to ``count``."""
    powers, inverses = (
        np.cumprod(np.full(count, base, dtype=np.uint32), dtype=np.uint32) for base in (_A, pow(_A, -1, 2**32))
    )
    return powers, inverses * np.uint32(_SPREAD)
