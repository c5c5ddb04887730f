"""The thread that reads blocks, over a mock engine's memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from kvrelay.config import EngineConfig, MockConfig
from kvrelay.core.checksums import block_checksum
from kvrelay.executors.mock import MockExecutor
from kvrelay.worker.checksums import BlockChecksums

WAIT_S = 60.0


@pytest.fixture
def executor() -> MockExecutor:
    executor = MockExecutor(EngineConfig(num_blocks=32), MockConfig(speedup_ratio=0), vocab_size=100)
    executor.pool[...] = range(executor.pool.shape[-1])
    for block_id in range(32):
        executor.pool[block_id, 0, 0] = block_id
    return executor


@pytest.fixture
def checksums(executor: MockExecutor) -> Iterator[BlockChecksums]:
    checksums = BlockChecksums(executor, required=True)
    yield checksums
    checksums.close()


def answer_of(ask: Callable[[Callable[[object], None]], None]) -> object:
    """What a callback was given, and that it did not run on this thread."""
    answers: list[tuple[object, int]] = []
    told = threading.Event()

    def on_done(answer: object) -> None:
        answers.append((answer, threading.get_ident()))
        told.set()

    ask(on_done)
    assert told.wait(WAIT_S)
    ((answer, thread),) = answers
    assert thread != threading.get_ident()
    return answer


async def test_one_per_block_in_the_order_given(executor: MockExecutor, checksums: BlockChecksums) -> None:
    expected = tuple(block_checksum(executor.pool[block_id].reshape(-1).view("u1")) for block_id in (5, 2, 9))
    assert len(set(expected)) == 3
    assert answer_of(lambda on_done: checksums.compute((5, 2, 9), on_done)) == expected
    assert await checksums.of((5, 2, 9)) == expected
    assert await checksums.of(()) == ()


def test_blocks_that_changed_are_found(executor: MockExecutor, checksums: BlockChecksums) -> None:
    sent = executor.checksum_blocks((5, 2, 9))
    assert answer_of(lambda on_done: checksums.verify((5, 2, 9), sent, on_done)) is None
    executor.pool[2, 1, -1] ^= 1 << 31
    assert "block 2 first" in str(answer_of(lambda on_done: checksums.verify((5, 2, 9), sent, on_done)))


async def test_a_device_that_fails_gives_no_checksums_and_no_trust(
    executor: MockExecutor, checksums: BlockChecksums, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(block_ids: object) -> tuple[int, ...]:
        raise RuntimeError("device lost")

    sent = executor.checksum_blocks((1,))
    monkeypatch.setattr(executor, "checksum_blocks", fail)
    assert answer_of(lambda on_done: checksums.compute((1,), on_done)) is None
    assert await checksums.of((1,)) is None
    assert answer_of(lambda on_done: checksums.verify((1,), sent, on_done)) == "it cannot be read"


def test_a_callback_that_fails_does_not_end_the_thread(checksums: BlockChecksums) -> None:
    def fail(answer: object) -> None:
        raise RuntimeError("a fault of somebody else")

    checksums.compute((1,), fail)
    assert answer_of(lambda on_done: checksums.compute((1,), on_done)) is not None


def test_close_waits_for_what_is_being_computed(executor: MockExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    entered, leave = threading.Event(), threading.Event()
    compute = executor.checksum_blocks

    def slow(block_ids: tuple[int, ...]) -> tuple[int, ...]:
        entered.set()
        assert leave.wait(WAIT_S)
        return compute(block_ids)

    monkeypatch.setattr(executor, "checksum_blocks", slow)
    checksums = BlockChecksums(executor, required=False)
    answers: list[object] = []
    checksums.compute((1,), answers.append)
    assert entered.wait(WAIT_S)
    closing = threading.Thread(target=checksums.close)
    closing.start()
    assert answers == []
    leave.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert answers == [compute((1,))]
    checksums.close()
