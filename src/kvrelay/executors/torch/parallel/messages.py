"""The messages between driver and ranks: typed msgpack, arrays as their bytes. Nothing is pickled.

driver ──Start──> rank         which model, which part         rank ──WeightsLoaded──> driver   a block's memory
driver ──AllocatePool──> rank  how many blocks                 rank ──RankReady──> driver
driver ──WarmUp──> rank                                        rank ──RankReady──> driver
driver ──RunStep──> rank       a step lies in shared memory    rank ──StepDone──> driver        tokens from one of them
driver ──DummyStep──> rank     a step without a batch          rank ──StepDone──> driver
driver ──RankPing──> rank      between two steps               rank ──RankReady──> driver
driver ──Stop──> rank                                          rank ──RankFailed──> driver      in place of any answer

On the side, while a step runs:
driver ──Prepare──> rank       compile a grammar               rank ──RankReady──> driver
driver ──ShowBlocks──> rank    copy blocks where they can be   rank ──RankReady──> driver
                               read, from a pool that is not
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from kvrelay.config.settings import EngineConfig, GroupConfig, RunnerConfig
from kvrelay.core.layout import KVLayout
from kvrelay.core.sampling import SamplingParams
from kvrelay.engine.step import Int32Array, ModelOutput, NewSequence, SchedulerOutput
from kvrelay.executors.torch.config import ModelFacts

# -- commands ---------------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, frozen=True, tag=True):
    """``store`` is a file by which the ranks find each other. ``runner.num_threads`` counts this rank's threads."""

    model_dir: str
    runner: RunnerConfig
    engine: EngineConfig
    index: int
    store: str
    group: GroupConfig


class AllocatePool(msgspec.Struct, frozen=True, tag=True):
    """``is_joined``: in the memory that the driver has mapped, beside the other ranks' pools."""

    num_blocks: int
    is_joined: bool


class WarmUp(msgspec.Struct, frozen=True, tag=True):
    pass


class RunStep(msgspec.Struct, frozen=True, tag=True):
    """``num_bytes`` of a StepMessage are in the step memory, which is ``capacity`` bytes long."""

    num_bytes: int
    capacity: int


class DummyStep(msgspec.Struct, frozen=True, tag=True):
    pass


class RankPing(msgspec.Struct, frozen=True, tag=True):
    pass


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class Prepare(msgspec.Struct, frozen=True, tag=True):
    sampling: SamplingParams


class ShowBlocks(msgspec.Struct, frozen=True, tag=True):
    """Into the joined pool's memory, at their place there."""

    block_ids: list[int]


Question = Prepare | ShowBlocks

Command = Start | AllocatePool | WarmUp | RunStep | DummyStep | RankPing | Stop

# -- answers ----------------------------------------------------------------------------------------------------------


class WeightsLoaded(msgspec.Struct, frozen=True, tag=True):
    """The weights are loaded. ``max_blocks``: the number of blocks that fit into this rank's memory."""

    layout: KVLayout
    max_blocks: int
    device: str
    facts: ModelFacts


class RankReady(msgspec.Struct, frozen=True, tag=True):
    pass


class StepDone(ModelOutput, frozen=True, tag=True):
    """From the rank that samples; empty from the others."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """``kind`` is a class of ``kvrelay.errors``, or empty. ``is_peer_lost``: another rank had failed before."""

    kind: str
    message: str
    is_peer_lost: bool = False


Answer = WeightsLoaded | RankReady | StepDone | RankFailed

# -- the step ---------------------------------------------------------------------------------------------------------


class SequenceMessage(msgspec.Struct, frozen=True, array_like=True):
    """A NewSequence without its id, which no rank needs."""

    slot: int
    token_ids: bytes
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: bytes
    sampling: SamplingParams
    seed: int


class StepMessage(msgspec.Struct, frozen=True, array_like=True):
    """A SchedulerOutput, and the tokens that the step before sampled (``drawn_slots``, ``drawn_tokens``). All ranks
    except the sampling rank get those tokens here."""

    step: int
    drawn_slots: bytes
    drawn_tokens: bytes
    new_seqs: tuple[SequenceMessage, ...]
    released_slots: tuple[int, ...]
    samples: bytes
    block_ids: bytes
    others: tuple[bytes, ...]
    """The arrays that _OTHERS names."""


_OTHERS = ("slots", "num_tokens", "block_slots", "block_indices")
_encoder = msgspec.msgpack.Encoder()
_step_decoder = msgspec.msgpack.Decoder(StepMessage)


def encode_step(work: SchedulerOutput, drawn_slots: Int32Array, drawn_tokens: Sequence[int]) -> bytes:
    return _encoder.encode(
        StepMessage(
            work.step,
            drawn_slots.tobytes(),
            _ints(drawn_tokens).tobytes(),
            tuple(_sequence_message(sequence) for sequence in work.new_seqs),
            tuple(int(slot) for slot in work.released_slots),
            work.samples.tobytes(),
            work.block_ids.tobytes(),
            tuple(getattr(work, name).tobytes() for name in _OTHERS),
        )
    )


def decode_step(frame: bytes | memoryview, block_factor: int, block_offset: int) -> tuple[SchedulerOutput, StepMessage]:
    """The step, with this rank's own block ids: ``id * block_factor + block_offset``; and the message itself."""
    message = _step_decoder.decode(frame)

    def blocks(data: bytes) -> Int32Array:
        return (_array(data) * np.int32(block_factor) + np.int32(block_offset)).astype(np.int32)

    work = SchedulerOutput(
        step=message.step,
        new_seqs=tuple(
            NewSequence(
                each.slot,
                "",
                _tokens(each),
                each.num_prompt_tokens,
                each.num_computed_tokens,
                blocks(each.block_ids),  # type: ignore[arg-type]  # it is only copied
                each.sampling,
                each.seed,
            )
            for each in message.new_seqs
        ),
        released_slots=message.released_slots,
        samples=np.frombuffer(message.samples, dtype=np.bool_).copy(),
        block_ids=blocks(message.block_ids),
        **dict(zip(_OTHERS, map(_array, message.others), strict=True)),
    )
    return work, message


def drawn(message: StepMessage) -> tuple[Int32Array, Int32Array]:
    """Slots, and the token that each sampled in the step before."""
    return _array(message.drawn_slots), _array(message.drawn_tokens)


def _sequence_message(sequence: NewSequence) -> SequenceMessage:
    return SequenceMessage(
        int(sequence.slot),
        _ints(sequence.token_ids).tobytes(),
        int(sequence.num_prompt_tokens),
        int(sequence.num_computed_tokens),
        _ints(sequence.block_ids).tobytes(),
        sequence.sampling,
        int(sequence.seed),
    )


def _tokens(message: SequenceMessage) -> Sequence[int]:
    tokens = _array(message.token_ids)
    # The Rust code that walks grammars takes Python integers.
    return tokens.tolist() if message.sampling.grammar is not None else tokens  # type: ignore[return-value]


def _ints(values: Sequence[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _array(data: bytes) -> Int32Array:
    # Copy, because compiled kernels take writable arrays: read-only arrays would need another compilation.
    return np.frombuffer(data, dtype=np.int32).copy()
