"""Ten thousand injected faults: never a wrong byte, never a hang, and the store goes on."""

from __future__ import annotations

import errno
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.tiers.conftest import SHAPE, MakeStore, PrivateMemory, host_bytes, name_of, payload_of
from tests.tiers.engines import TieredEngine, expected, prompt_of
from tests.tiers.waiting import settled

from kvrelay.tiers import disk, host
from kvrelay.tiers.block import BlockName, Shape, header_of
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.host import NUM_WAYS, HostStore
from kvrelay.tiers.store import BlockStore

NUM_BLOCKS = 24
SOON, ALL = 300, 5000


def count(request_faults: int) -> object:
    marks = [] if request_faults == SOON else [pytest.mark.matrix]
    return pytest.param(request_faults, marks=marks, id=f"{request_faults}-faults")


FAULTS = [count(SOON), count(ALL)]


def check(store: BlockStore, number: int, seen: Counter[str]) -> None:
    """Read a block: it is right or a miss. Then store it again, so that the next fault has something to hit."""
    into = bytearray(SHAPE.block_bytes)
    if store.load(name_of(number), memoryview(into)):
        assert bytes(into) == payload_of(number)
        seen["hit"] += 1
    else:
        seen["miss"] += 1
    store.store(name_of(number), memoryview(payload_of(number)), 1.0)


@pytest.mark.parametrize("num_faults", FAULTS)
def test_faults_of_host_memory(num_faults: int) -> None:
    """Flipped bits, noise, zeros, blocks copied over others, torn writes: anywhere in the shared memory."""
    rng = random.Random(20)
    memory = PrivateMemory(host_bytes(NUM_BLOCKS))
    content, size = memory.memory, len(memory.memory)
    store = HostStore(memory, SHAPE)
    seen: Counter[str] = Counter()
    for _ in range(num_faults):
        at, length = rng.randrange(size), rng.choice([1, 8, 64, 300])
        end = min(at + length, size)
        match rng.choice(["flip", "noise", "zeros", "copy", "torn"]):
            case "flip":
                content[at] ^= 1 << rng.randrange(8)
            case "noise":
                content[at:end] = rng.randbytes(end - at)
            case "zeros":
                content[at:end] = bytes(end - at)
            case "copy":
                source = rng.randrange(size - (end - at))
                content[at:end] = content[source : source + end - at]
            case "torn":
                before = content[at:end]
                store.store(name_of(rng.randrange(NUM_BLOCKS)), memoryview(payload_of(0)), 1e9)
                content[at:end] = before
        # A fault may have stored another payload under a name: whatever is read must be what was stored last.
        number = rng.randrange(1, NUM_BLOCKS)
        check_any(store, number, seen)
    assert seen["hit"] > num_faults // 10
    assert seen["miss"] > num_faults // 100


def check_any(store: BlockStore, number: int, seen: Counter[str]) -> None:
    """As ``check``, where payload 0 may have been stored under any name."""
    into = bytearray(SHAPE.block_bytes)
    if store.load(name_of(number), memoryview(into)):
        assert bytes(into) in (payload_of(number), payload_of(0))
        seen["hit"] += 1
    else:
        seen["miss"] += 1
    store.store(name_of(number), memoryview(payload_of(number)), 1.0)


@pytest.mark.parametrize("num_faults", FAULTS)
def test_faults_of_disks(
    num_faults: int, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flipped bits, short, long, empty, foreign, swapped and missing files, and errors of reads and writes."""
    rng = random.Random(21)
    monkeypatch.setattr(disk, "PAUSE_S", 0.0)
    store = make_store("disk")
    assert isinstance(store, DiskStore)
    seen: Counter[str] = Counter()
    for number in range(NUM_BLOCKS):
        check(store, number, seen)
    for _ in range(num_faults):
        settled(store)
        paths = sorted((tmp_path / "kv").rglob("[0-9a-f]" * 16))
        path = rng.choice(paths) if paths else None
        kind = rng.choice(["flip", "short", "long", "empty", "foreign", "swap", "gone", "read error", "write error"])
        with monkeypatch.context() as patch:
            if kind == "read error":
                patch.setattr(disk, "read_block", failing(rng.choice([errno.EIO, errno.EACCES])))
            elif kind == "write error":
                patch.setattr(disk.os, "writev", failing(rng.choice([errno.EIO, errno.ENOSPC])))
                if path is not None:
                    path.unlink()
            elif path is not None:
                harm(path, kind, rng, paths)
            check(store, rng.randrange(NUM_BLOCKS), seen)
            settled(store)
    assert seen["hit"] > num_faults // 10
    assert seen["miss"] > num_faults // 10


def failing(number: int) -> object:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def harm(path: Path, kind: str, rng: random.Random, paths: list[Path]) -> None:
    content = bytearray(path.read_bytes())
    match kind:
        case "flip":
            if content:
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case "short":
            content = content[: len(content) // 2]
        case "long":
            content += rng.randbytes(3)
        case "empty":
            content = bytearray()
        case "foreign":
            content = bytearray(rng.randbytes(len(content)))
        case "swap":
            content = bytearray(rng.choice(paths).read_bytes())
        case "gone":
            path.unlink()
            return
    path.write_bytes(content)


def test_an_engine_over_faulty_memory_answers_right() -> None:
    """The mock executor notices each wrong byte of KV: no answer differs."""
    rng = random.Random(22)
    memory = PrivateMemory(1 << 16)
    engine = TieredEngine(lambda shape: [HostStore(memory, shape)])
    try:
        for _ in range(200):
            prompts = [prompt_of(rng.randrange(12)) for _ in range(2)]
            assert engine.ask(*prompts) == [expected(prompt) for prompt in prompts]
            for _ in range(3):
                memory.memory[rng.randrange(len(memory.memory))] ^= 1 << rng.randrange(8)
            at = rng.randrange(len(memory.memory) - 200)
            memory.memory[at : at + 200] = rng.randbytes(200)
        assert engine.tiers.counts.num_hits > 50
    finally:
        engine.close()


def test_a_writer_that_is_stopped_half_way_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is stopped in the middle of a slot that held another block: readers go on, and miss both."""
    memory = PrivateMemory(host_bytes(NUM_WAYS))
    store = HostStore(memory, SHAPE)
    for number in range(NUM_WAYS):
        store.store(name_of(number), memoryview(payload_of(number)), 1.0)
    child = os.fork()
    if not child:
        try:
            monkeypatch.setattr(host, "header_of", stopped_header_of)
            store.store(name_of(100), memoryview(payload_of(100)), 1.0)
        finally:
            os._exit(0)
    try:
        assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
        into = bytearray(SHAPE.block_bytes)
        hits = [number for number in [*range(NUM_WAYS), 100] if store.load(name_of(number), memoryview(into))]
        assert len(hits) == NUM_WAYS - 1
        assert 100 not in hits
        os.kill(child, signal.SIGCONT)
        assert os.WEXITSTATUS(os.waitpid(child, 0)[1]) == 0
        child = 0
        assert store.load(name_of(100), memoryview(into))
        assert bytes(into) == payload_of(100)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def stopped_header_of(name: BlockName, shape: Shape, payload: memoryview) -> bytes:
    os.kill(os.getpid(), signal.SIGSTOP)
    return header_of(name, shape, payload)
