"""An executor without a model: a timing model, and a KV pool that detects lost, late and misplaced blocks.

It owns a real memory pool, so transports move its blocks like those of any executor. Position p of a sequence stores

    K[p] = token p        V[p] = h[p],   h[p] = h[p-1] * A + spread(token p)   (mod 2**32),   h[-1] = SEED

and the token after p is a function of h[p], read from the pool through the block table. So the answer depends on every
token before it, and ``mock_generate`` computes it without a pool. When a sequence enters, all its computed blocks
(prefix hits, transferred blocks) are verified; each decode verifies one more block, in turn. After a damaged block a
sequence's answer has wrong tokens.

The process needs no torch.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
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
from kvrelay.executors.host_memory import HostMemory

Uint32Array = npt.NDArray[np.uint32]
Int64Array = npt.NDArray[np.int64]

HANG_POLL_S = 0.05
DEFAULT_NUM_BLOCKS = 16384

_A = np.uint32(0x9E3779B1)
_SEED = np.uint32(0x12345679)
_SPREAD = np.uint32(0x85EBCA6B)
_MIX = np.uint32(0xC2B2AE35)


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
        self.vocab_size, self.eos_token_ids, self.weights_fingerprint = vocab_size, eos_token_ids, f"mock-{vocab_size}"
        self._never_generated = eos_token_ids
        self.max_model_len = min(max_model_len, config.max_model_len or max_model_len)
        self._block_size = config.block_size
        self.num_blocks = config.num_blocks or DEFAULT_NUM_BLOCKS
        self.kv_layout = paged_kv(1, 1, config.block_size, 1, "int32")
        self.num_holding_blocks = num_holding_blocks(holding_bytes, self.kv_layout.block_bytes, self.num_blocks)
        self.num_spill_blocks = num_holding_blocks(spill_bytes, self.kv_layout.block_bytes, self.num_blocks)
        num_all_blocks = self.num_blocks + self.num_holding_blocks + self.num_spill_blocks
        num_bytes = num_all_blocks * self.kv_layout.block_bytes
        self._memory = allocate(num_bytes) if allocate is not None else mmap.mmap(-1, num_bytes)
        pool = np.frombuffer(self._memory, dtype=np.uint32)
        self.pool: Uint32Array = pool.reshape(num_all_blocks, 2, self._block_size)
        """As [block of pool or holding area, K or V, block_size]."""
        self._bytes = pool.view(np.uint8).reshape(num_all_blocks, self.kv_layout.block_bytes)
        num_registered = (self.num_blocks + self.num_holding_blocks) * self.kv_layout.block_bytes
        self.kv_region = MemoryRegion(pool.ctypes.data, num_registered)
        max_blocks = -(-self.max_model_len // self._block_size) + 1
        # The system provides memory when it is first touched, so long contexts cost nothing until they are used.
        self._tokens = np.zeros((config.max_num_seqs, self.max_model_len + 1), dtype=np.uint32)
        self._block_table = np.zeros((config.max_num_seqs, max_blocks), dtype=np.int32)
        self._num_computed = np.zeros(config.max_num_seqs, dtype=np.int64)
        self._damaged = np.zeros(config.max_num_seqs, dtype=np.uint32)
        self._sequences: dict[int, NewSequence] = {}
        self._asking: set[int] = set()
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
            self._asking.discard(slot)
            self._grammars.release(slot)
        for sequence in work.new_seqs:
            self._enter(sequence)
        if len(work.block_ids):
            self._block_table[work.block_slots, work.block_indices] = work.block_ids
        if not work.num_seqs:
            return ModelOutput([])
        num_decodes = self._num_decodes(work)
        self._pass_time(work, num_decodes)
        return self._compute(work, num_decodes)

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

    def _pass_time(self, work: SchedulerOutput, num_decodes: int) -> None:
        mock = self._mock
        while mock.hang_file and os.path.exists(f"{mock.hang_file}.{os.getpid()}"):
            time.sleep(HANG_POLL_S)
        if mock.speedup_ratio == 0:
            return
        seconds = 0.0
        if num_decodes:
            seconds += mock.decode_base_s + mock.decode_seq_s * num_decodes
        num_prefilled = int(work.num_tokens[num_decodes:].sum())
        if num_prefilled:
            seconds += mock.prefill_base_s + mock.prefill_token_s * num_prefilled
        self._sleep(seconds / mock.speedup_ratio)

    def _num_decodes(self, work: SchedulerOutput) -> int:
        """Leading rows of one token that continue after the prompt."""
        longer = np.flatnonzero(work.num_tokens != 1)
        return int(longer[0]) if len(longer) else work.num_seqs

    # -- the arithmetic -----------------------------------------------------------------------------------------------

    def _enter(self, sequence: NewSequence) -> None:
        slot, num_computed = sequence.slot, sequence.num_computed_tokens
        self._sequences[slot] = sequence
        if sequence.sampling.logprobs is not None or sequence.sampling.prompt_logprobs is not None:
            self._asking.add(slot)
        else:
            self._asking.discard(slot)
        self._tokens[slot, : len(sequence.token_ids)] = sequence.token_ids
        self._block_table[slot, : len(sequence.block_ids)] = sequence.block_ids
        self._num_computed[slot] = num_computed
        self._damaged[slot] = 0
        outputs = sequence.token_ids[sequence.num_prompt_tokens :]
        self._grammars.enter(slot, sequence.sampling, outputs)
        if num_computed:
            keys, hashes = self._read(slot, num_computed)
            tokens = self._tokens[slot, :num_computed]
            intact = np.array_equal(keys, tokens) and np.array_equal(hashes, _hash_chain(tokens, _SEED))
            self._damaged[slot] = not intact

    def _read(self, slot: int, count: int) -> tuple[Uint32Array, Uint32Array]:
        """K and V of the slot's first ``count`` positions."""
        blocks = self.pool[self._block_table[slot, : -(-count // self._block_size)]]
        return blocks[:, 0].reshape(-1)[:count], blocks[:, 1].reshape(-1)[:count]

    def _compute(self, work: SchedulerOutput, num_decodes: int) -> ModelOutput:
        slots = work.slots
        last_hashes = np.empty(work.num_seqs, dtype=np.uint32)
        if num_decodes:
            last_hashes[:num_decodes] = self._decode(slots[:num_decodes])
        prompt_logprobs: dict[int, list[PositionLogprobs]] = {}
        for row in range(num_decodes, work.num_seqs):
            last_hashes[row] = self._prefill(int(slots[row]), int(work.num_tokens[row]))
        if self._asking:
            prompt_logprobs = self._prompt_logprobs(work)
        self._num_computed[slots] += work.num_tokens
        sampled = np.flatnonzero(work.samples)
        chosen = slots[sampled]
        token_ids = next_tokens(last_hashes[sampled], self.vocab_size, self._never_generated, self._damaged[chosen])
        outputs = token_ids.tolist()
        failures = self._obey_grammars(chosen, sampled, outputs) if self._grammars else {}
        if self._grammars:
            drawn = np.array(outputs, dtype=np.int64)
            sits_out = drawn == NO_TOKEN
            self._num_computed[chosen[sits_out]] -= 1
            chosen, token_ids = chosen[~sits_out], drawn[~sits_out].astype(np.uint32)
        self._tokens[chosen, self._num_computed[chosen]] = token_ids
        result = ModelOutput(outputs, prompt_logprobs=prompt_logprobs, failures=failures)
        if self._asking:
            self._add_logprobs(result, sampled.tolist(), slots)
        return result

    def _obey_grammars(
        self, slots: npt.NDArray[np.int32], rows: npt.NDArray[np.intp], token_ids: list[int]
    ) -> dict[int, str]:
        """Replace tokens that a grammar forbids by one that it allows, or by NO_TOKEN if its mask is late, in place;
        returns failures by row."""
        computing = self._grammars.begin(slots.tolist())
        if computing is None:
            return {}
        masks = computing.result()
        for number, forbidden in zip(masks.rows, masks.forbidden()):
            allowed = np.flatnonzero(~forbidden)
            if forbidden[token_ids[number]]:
                token_ids[number] = int(allowed[token_ids[number] % len(allowed)])
        for number in masks.late:
            token_ids[number] = NO_TOKEN
        self._grammars.advance(slots.tolist(), token_ids)
        return {int(rows[number]): reason for number, reason in masks.failures.items()}

    def _decode(self, slots: npt.NDArray[np.int32]) -> Uint32Array:
        """One position for each slot; returns its hash."""
        size = self._block_size
        positions = self._num_computed[slots]
        before = np.maximum(positions - 1, 0)
        previous = self.pool[self._block_table[slots, before // size], 1, before % size]
        previous = np.where(positions > 0, previous, _SEED)
        tokens = self._tokens[slots, positions]
        hashes = previous * _A + tokens * _SPREAD
        blocks = self._block_table[slots, positions // size]
        self.pool[blocks, 0, positions % size] = tokens
        self.pool[blocks, 1, positions % size] = hashes
        self._verify_one_block(slots, positions)
        return hashes

    def _verify_one_block(self, slots: npt.NDArray[np.int32], positions: Int64Array) -> None:
        """Check one full block of each slot, a different one at each position: its tokens and its chain of hashes."""
        size = self._block_size
        num_full = positions // size
        index = positions % np.maximum(num_full, 1)
        blocks = self.pool[self._block_table[slots, index]]
        expected = self._tokens[slots[:, None], (index * size)[:, None] + np.arange(size)]
        keys, hashes = blocks[:, 0], blocks[:, 1]
        before_block = self.pool[self._block_table[slots, np.maximum(index - 1, 0)], 1, size - 1]
        previous = np.empty_like(hashes)
        previous[:, 0] = np.where(index > 0, before_block, _SEED)
        previous[:, 1:] = hashes[:, :-1]
        wrong = ((keys != expected) | (hashes != previous * _A + expected * _SPREAD)).any(axis=1)
        self._damaged[slots] |= (wrong & (num_full > 0)).astype(np.uint32)

    def _prefill(self, slot: int, count: int) -> np.uint32:
        """``count`` positions of one slot; returns the last one's hash."""
        size = self._block_size
        first = int(self._num_computed[slot])
        previous = _SEED
        if first:
            previous = self.pool[self._block_table[slot, (first - 1) // size], 1, (first - 1) % size]
        tokens = self._tokens[slot, first : first + count]
        hashes = _hash_chain(tokens, previous)
        positions = np.arange(first, first + count)
        blocks = self._block_table[slot, positions // size]
        self.pool[blocks, 0, positions % size] = tokens
        self.pool[blocks, 1, positions % size] = hashes
        return np.uint32(hashes[-1])

    # -- invented logprobs ---------------------------------------------------------------------------------------------

    def _add_logprobs(self, result: ModelOutput, rows: list[int], slots: npt.NDArray[np.int32]) -> None:
        for row, token_id in zip(rows, result.token_ids, strict=True):
            count = self._sequences[int(slots[row])].sampling.logprobs
            if count is not None and token_id != NO_TOKEN:
                result.logprobs[row] = mock_logprobs(token_id, count, self.vocab_size)

    def _prompt_logprobs(self, work: SchedulerOutput) -> dict[int, list[PositionLogprobs]]:
        found: dict[int, list[PositionLogprobs]] = {}
        for row, slot in enumerate(work.slots.tolist()):
            sequence = self._sequences[slot]
            count = sequence.sampling.prompt_logprobs
            first = int(self._num_computed[slot])
            if slot not in self._asking or count is None or first >= sequence.num_prompt_tokens:
                continue
            end = min(first + int(work.num_tokens[row]), sequence.num_prompt_tokens)
            tokens = self._tokens[slot, max(first, 1) : end].tolist()
            found[row] = [mock_logprobs(token, count, self.vocab_size) for token in tokens]
        return found


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
    last = _hash_chain(np.asarray(prompt, dtype=np.uint32), _SEED)[-1:]
    undamaged = np.zeros(1, dtype=np.uint32)
    answer = []
    for _ in range(num_tokens):
        token = next_tokens(last, vocab_size, eos_token_ids, undamaged)
        answer.append(int(token[0]))
        last = last * _A + token * _SPREAD
    return answer


def next_tokens(
    hashes: Uint32Array, vocab_size: int, eos_token_ids: tuple[int, ...], damaged: Uint32Array
) -> Uint32Array:
    """The token after each hash: a wrong one if ``damaged`` is not 0, and never one of ``eos_token_ids``."""
    mixed = hashes ^ (hashes >> np.uint32(15)) ^ damaged
    mixed = mixed * _MIX
    mixed = mixed ^ (mixed >> np.uint32(13))
    mixed = mixed % np.uint32(vocab_size - len(eos_token_ids))
    for eos in sorted(eos_token_ids):
        mixed = mixed + (mixed >= np.uint32(eos)).astype(np.uint32)
    return mixed


def mock_logprobs(token_id: int, num_top: int, vocab_size: int) -> PositionLogprobs:
    """The chosen token as the likeliest, followed by its neighbours in the vocabulary."""
    top = tuple(
        TokenLogprob((token_id + rank) % vocab_size, -0.5 - rank, rank + 1) for rank in range(min(num_top, vocab_size))
    )
    return PositionLogprobs(TokenLogprob(token_id, -0.5, 1), top)


def _hash_chain(tokens: Uint32Array, previous: np.uint32) -> Uint32Array:
    """h[i] = h[i-1] * A + tokens[i] * SPREAD for all i at once, with h[-1] = ``previous``.

    Since A is odd it has an inverse modulo 2**32, and h[i] = A**(i+1) * (previous + sum of SPREAD * t[j] / A**(j+1)).
    """
    count = len(tokens)
    powers = np.cumprod(np.full(count, _A, dtype=np.uint32), dtype=np.uint32)
    inverses = np.cumprod(np.full(count, _A_INVERSE, dtype=np.uint32), dtype=np.uint32)
    sums = np.cumsum(tokens * _SPREAD * inverses, dtype=np.uint32)
    start = np.full(count, previous, dtype=np.uint32)
    return powers * (start + sums)


_A_INVERSE = np.uint32(pow(int(_A), -1, 2**32))
