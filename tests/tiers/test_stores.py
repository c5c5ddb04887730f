"""The contract of a store, for each kind: what it keeps, it keeps whole; what is not the block, it does not give."""

from __future__ import annotations

import errno
import os
import stat
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.patience import until
from tests.tiers.conftest import KINDS, LAYOUT, SHAPE, MakeStore, PrivateMemory, host_bytes, name_of, payload_of
from tests.tiers.waiting import settled

from kvrelay.core.token_ids import to_bytes
from kvrelay.errors import ConfigError
from kvrelay.tiers import disk, disk_index, host
from kvrelay.tiers.block import BlockName, header_of, refusal, shape_of
from kvrelay.tiers.disk import DiskStore
from kvrelay.tiers.disk_index import clear_directory
from kvrelay.tiers.host import CLOCK_BYTES, NUM_WAYS, HostStore
from kvrelay.tiers.store import BlockStore


def put(store: BlockStore, number: int, worth_s: float = 1.0) -> None:
    store.store(name_of(number), memoryview(payload_of(number)), worth_s)
    settled(store)


def get(store: BlockStore, name: BlockName) -> bytes | None:
    into = bytearray(SHAPE.block_bytes)
    return bytes(into) if store.load(name, memoryview(into)) else None


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_loaded(kind: str, make_store: MakeStore) -> None:
    store = make_store(kind)
    for number in range(20):
        put(store, number)
    assert all(get(store, name_of(number)) == payload_of(number) for number in range(20))
    assert (store.stats.num_stored, store.stats.num_loaded) == (20, 20)
    assert not store.stats.misses


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_block_is_a_miss(kind: str, make_store: MakeStore) -> None:
    store = make_store(kind)
    assert not store.holds(name_of(1).sequence_hash)
    assert get(store, name_of(1)) is None
    assert store.stats.misses["gone"] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("field", ["tokens", "parent"])
def test_a_hash_of_another_prompt_is_a_miss_and_stays(kind: str, field: str, make_store: MakeStore) -> None:
    store = make_store(kind)
    put(store, 1)
    name = name_of(1)
    other = name._replace(tokens=to_bytes((1, 2, 3, 4))) if field == "tokens" else name._replace(parent_hash=7)
    assert get(store, other) is None
    assert get(store, name) == payload_of(1)


@pytest.mark.parametrize("kind", KINDS)
def test_another_model_sees_nothing(kind: str, make_store: MakeStore) -> None:
    memory = PrivateMemory(host_bytes(64))
    put(make_store(kind, memory=memory), 1)
    other = make_store(kind, shape=shape_of("another model", LAYOUT), memory=memory)
    assert get(settled(other), name_of(1)) is None


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_worker_finds_what_the_first_stored(kind: str, make_store: MakeStore) -> None:
    memory = PrivateMemory(host_bytes(64))
    first = make_store(kind, memory=memory)
    put(first, 1)
    second = settled(make_store(kind, memory=memory))
    assert second.holds(name_of(1).sequence_hash)
    assert get(second, name_of(1)) == payload_of(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_store_gives_way(kind: str, make_store: MakeStore) -> None:
    store = make_store(kind, 64)
    for number in range(400):
        put(store, number)
    kept = [number for number in range(400) if get(store, name_of(number)) is not None]
    assert 48 <= len(kept) <= 64
    assert sum(kept) / len(kept) > 300, "the latest stay"


@pytest.mark.parametrize("kind", KINDS)
def test_clear_forgets_everything(kind: str, make_store: MakeStore) -> None:
    store = make_store(kind)
    put(store, 1)
    assert store.clear() == 1
    assert get(settled(store), name_of(1)) is None
    put(store, 2)
    assert get(store, name_of(2)) == payload_of(2)


def test_what_is_worth_more_stays_in_host_memory(make_store: MakeStore) -> None:
    store = make_store("host", NUM_WAYS)
    for number in range(NUM_WAYS):
        put(store, number, worth_s=10.0)
    put(store, 100, worth_s=1.0)
    assert get(store, name_of(100)) is None
    assert store.stats.drops["worth_less"] == 1


def test_what_was_loaded_gives_way_first(make_store: MakeStore) -> None:
    store = make_store("host", NUM_WAYS)
    for number in range(NUM_WAYS):
        put(store, number, worth_s=10.0)
    assert get(store, name_of(3)) is not None
    put(store, 100, worth_s=1.0)
    assert get(store, name_of(3)) is None
    assert get(store, name_of(100)) is not None


def test_evicted_again_it_counts_again(make_store: MakeStore) -> None:
    store = make_store("host", NUM_WAYS)
    for number in range(NUM_WAYS):
        put(store, number, worth_s=10.0)
    assert get(store, name_of(3)) is not None
    assert store.worth_again(name_of(3).sequence_hash, 10.0)
    put(store, 100, worth_s=1.0)
    assert get(store, name_of(3)) is not None


def test_what_is_never_used_again_grows_old(make_store: MakeStore) -> None:
    """GDSF: a block that was worth much gives way once enough others have come."""
    store = make_store("host", NUM_WAYS)
    put(store, 0, worth_s=5.0)
    for number in range(1, 200):
        put(store, number, worth_s=1.0)
    assert get(store, name_of(0)) is None


def test_memory_that_others_write_may_hold_anything() -> None:
    """Tags, worths and slots of noise are misses, and the store still works."""
    memory = PrivateMemory(host_bytes(64))
    store = HostStore(memory, SHAPE)
    memory.memory[:] = os.urandom(len(memory.memory))
    assert all(get(store, name_of(number)) is None for number in range(50))
    for number in range(50):
        put(store, number, worth_s=1e15)
    assert sum(get(store, name_of(number)) == payload_of(number) for number in range(50)) > 0


def test_a_tag_over_another_block_is_taken_away() -> None:
    """Two writers of one slot may leave it: the block that the tag names can be stored again."""
    memory = PrivateMemory(host_bytes(NUM_WAYS))
    store = HostStore(memory, SHAPE)
    put(store, 1)
    struct.pack_into("<Q", memory.memory, CLOCK_BYTES, name_of(2).sequence_hash)
    assert get(store, name_of(2)) is None
    assert store.stats.misses["hash"] == 1
    put(store, 2)
    assert get(store, name_of(2)) == payload_of(2)


def test_clear_forgets_what_another_worker_is_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = PrivateMemory(host_bytes(64))
    writer, other = HostStore(memory, SHAPE), HostStore(memory, SHAPE)

    def cleared_meanwhile(*given: Any) -> bytes:
        other.clear()
        return header_of(*given)

    with monkeypatch.context() as patch:
        patch.setattr(host, "header_of", cleared_meanwhile)
        put(writer, 1)
    assert not other.holds(name_of(1).sequence_hash)
    assert writer.stats.drops["cleared"] == 1
    put(writer, 1)
    assert get(other, name_of(1)) == payload_of(1)


def test_two_writers_of_one_slot_never_mix() -> None:
    """Both write different payloads of one block, over and over: what is read is whole, or a miss."""
    memory = PrivateMemory(host_bytes(NUM_WAYS))
    stores = [HostStore(memory, SHAPE) for _ in range(2)]
    stop = threading.Event()

    def write(store: HostStore, first: int) -> None:
        while not stop.is_set():
            for number in range(first, first + 2 * NUM_WAYS):
                store.store(name_of(number), memoryview(payload_of(number)), 1.0)

    threads = [threading.Thread(target=write, args=(store, 10 * at)) for at, store in enumerate(stores)]
    for thread in threads:
        thread.start()
    reader = HostStore(memory, SHAPE)
    try:
        for turn in range(3000):
            number = turn % 26
            found = get(reader, name_of(number))
            assert found is None or found == payload_of(number)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_too_little_memory_or_disk_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="host_kv_cache is below"):
        HostStore(PrivateMemory(100), SHAPE)
    with pytest.raises(ConfigError, match="disk_kv_cache is below"):
        DiskStore(tmp_path, SHAPE, 10, 1e6)
    with pytest.raises(ConfigError, match=r"disk_kv_cache: 1048576\.0TiB were asked for, and the disk of .* has .*iB$"):
        DiskStore(tmp_path, SHAPE, 2**60, 1e6)


def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="disk_kv_cache"):
        DiskStore(tmp_path / "file", SHAPE, 10**6, 1e6)


# -- disks ------------------------------------------------------------------------------------------------------------


def files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def test_files_are_private(make_store: MakeStore, tmp_path: Path) -> None:
    put(make_store("disk"), 1)
    (path,) = files(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_disk_that_takes_nothing_drops(
    error: int, make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = settled(make_store("disk"))

    def fail(*_: object) -> int:
        raise OSError(error, "no")

    monkeypatch.setattr(disk.os, "writev", fail)
    put(store, 1)
    put(store, 2)
    monkeypatch.undo()
    assert get(store, name_of(1)) is None
    assert files(tmp_path) == []
    is_full = error != errno.EIO
    assert store.stats.drops == {errno.errorcode[error]: 1, "full": 1} if is_full else {errno.errorcode[error]: 2}


def test_an_unforeseen_failure_is_counted_and_told_once(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = settled(make_store("disk"))

    def fail(*_: object) -> int:
        raise RuntimeError("a defect")

    with monkeypatch.context() as patch:
        patch.setattr(disk.os, "writev", fail)
        put(store, 1)
        put(store, 2)
    assert store.stats.drops == {"error": 2}
    assert caplog.text.count("RuntimeError: a defect") == 1
    put(store, 1)
    assert get(store, name_of(1)) == payload_of(1)


def test_a_part_of_a_block_is_not_kept(make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = settled(make_store("disk"))
    write = os.write
    monkeypatch.setattr(disk.os, "writev", lambda fd, parts: write(fd, parts[0]))
    put(store, 1)
    assert files(tmp_path) == []
    assert store.stats.drops["ENOSPC"] == 1


def test_a_read_error_is_a_miss(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make_store("disk")
    put(store, 1)

    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, "bad sector")

    monkeypatch.setattr(disk, "read_block", fail)
    assert get(store, name_of(1)) is None
    assert store.stats.misses["EIO"] == 1


def test_a_disk_that_hangs_is_a_miss_and_never_writes_the_pool(
    make_store: MakeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_store("disk")
    put(store, 1)
    may_read = threading.Event()
    read = disk.read_block

    def hang(path: Path, num_bytes: int) -> bytes:
        may_read.wait()
        return read(path, num_bytes)

    monkeypatch.setattr(disk, "read_block", hang)
    monkeypatch.setattr(disk, "LOAD_TIMEOUT_S", 0.01)
    into = bytearray(SHAPE.block_bytes)
    assert not store.load(name_of(1), memoryview(into))
    assert store.stats.misses["slow"] == 1
    assert not store.holds(name_of(1).sequence_hash), "for a while nothing is asked of it"
    may_read.set()
    monkeypatch.setattr(disk, "LOAD_TIMEOUT_S", 60.0)
    settled(store)
    assert not any(into)


def test_what_is_no_file_of_a_blocks_size_is_not_read(make_store: MakeStore, tmp_path: Path) -> None:
    """Each in the place of a block: a sparse file of 40 GiB, a fifo, a link, a directory."""
    store = make_store("disk")
    for number in range(4):
        put(store, number)
    paths = {int(path.name, 16): path for path in files(tmp_path)}
    huge, fifo, link, folder = (paths[name_of(number).sequence_hash] for number in range(4))
    os.truncate(huge, 40 * 2**30)
    other = fifo.rename(tmp_path / "other")
    os.mkfifo(fifo)
    link.unlink()
    link.symlink_to(other)
    folder.unlink()
    folder.mkdir()
    assert [get(store, name_of(number)) for number in range(4)] == [None] * 4
    assert store.stats.misses == {"short": 2, "ELOOP": 1, "EISDIR": 1}
    settled(store)
    assert (huge.exists(), other.exists(), folder.exists()) == (False, True, True)
    again = settled(make_store("disk"))
    assert not any(again.holds(name_of(number).sequence_hash) for number in range(4))


def test_old_and_foreign_files(make_store: MakeStore, tmp_path: Path) -> None:
    """Files past their age go; files that are none of ours stay, and are no blocks."""
    put(make_store("disk"), 1)
    (path,) = files(tmp_path)
    os.utime(path, (1.0, 1.0))
    foreign = path.with_name("notes.txt")
    foreign.write_text("mine")
    stale = path.with_name(path.name + ".writing.1")
    stale.write_bytes(b"half")
    os.utime(stale, (1.0, 1.0))
    store = settled(make_store("disk"))
    assert not store.holds(name_of(1).sequence_hash)
    assert files(tmp_path) == [foreign]


def test_a_scan_asks_nothing_of_files_that_are_known(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    read = disk_index.entries

    class Entry:
        def __init__(self, number: int, entry: os.DirEntry[str]) -> None:
            self.number, self.entry = number, entry

        def stat(self) -> os.stat_result:
            asked.append(self.number)
            return self.entry.stat()

    monkeypatch.setattr(disk, "RESCAN_S", 0.0)
    monkeypatch.setattr(
        disk_index, "entries", lambda folder: [(number, Entry(number, at)) for number, at in read(folder)]
    )
    store, other = settled(make_store("disk")), settled(make_store("disk"))
    for number in range(10):
        put(store, number)
    assert asked == []
    put(other, 100)
    put(store, 10)
    assert name_of(100).sequence_hash in asked
    assert store.holds(name_of(100).sequence_hash)
    assert len(asked) == 11, "ten of the other store, and one of this"


def dated(store: BlockStore, tmp_path: Path, ages_s: dict[int, float]) -> None:
    """Put these blocks, and date each file so many seconds back."""
    now_s = time.time()
    for number, age_s in ages_s.items():
        put(store, number)
        (path,) = [path for path in files(tmp_path) if path.name == f"{name_of(number).sequence_hash:016x}"]
        os.utime(path, (now_s - age_s, now_s - age_s))


def kept(tmp_path: Path, numbers: Iterable[int]) -> set[int]:
    names = {path.name for path in files(tmp_path)}
    return {number for number in numbers if f"{name_of(number).sequence_hash:016x}" in names}


def test_the_limit_is_that_of_the_directory_not_of_a_model(make_store: MakeStore, tmp_path: Path) -> None:
    """Blocks of a model that is no longer served would stay for ever, and each further model add its own limit."""
    dated(make_store("disk", 8, shape=shape_of("another", LAYOUT)), tmp_path, {number: 600.0 for number in range(6)})
    store = settled(make_store("disk", 8))
    for number in range(10, 16):
        put(store, number)
    assert kept(tmp_path, range(10, 16)) == set(range(10, 16))
    assert len(files(tmp_path)) <= 8


def test_the_oldest_goes_first_whatever_its_folder(make_store: MakeStore, tmp_path: Path) -> None:
    """A worker that starts finds files in the order of their names."""
    dated(make_store("disk", 64), tmp_path, {number: 1000.0 - number for number in range(64)})
    settled(make_store("disk", 16))
    left = kept(tmp_path, range(64))
    assert 12 <= len(left) <= 16
    assert left == set(range(64 - len(left), 64))


def test_what_another_worker_has_used_is_not_the_oldest(make_store: MakeStore, tmp_path: Path) -> None:
    dated(make_store("disk", 8), tmp_path, {number: 1000.0 - number for number in range(8)})
    store, other = settled(make_store("disk", 8)), settled(make_store("disk", 8))
    assert get(other, name_of(0)) == payload_of(0)
    settled(other)
    put(store, 100)
    assert 0 in kept(tmp_path, range(8))
    assert 1 not in kept(tmp_path, range(8))


def test_a_file_of_the_future_is_removed_as_any_other(make_store: MakeStore, tmp_path: Path) -> None:
    """The clock was set back: such a file must not stay for ever, nor hold up the others."""
    dated(make_store("disk", 8), tmp_path, {number: -86400.0 for number in range(8)})
    store = settled(make_store("disk", 8))
    for number in range(10, 18):
        put(store, number)
    assert kept(tmp_path, range(8)) == set()


def test_blocks_of_a_future_that_was_set_back_are_no_newer_than_those_written_now(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each new block would be the oldest, and be evicted at once, until the clock is there again."""
    store = settled(make_store("disk", 8))
    now = time.time
    with monkeypatch.context() as patch:
        patch.setattr(time, "time", lambda: now() + 86400.0)
        for number in range(8):
            put(store, number)
    for number in range(10, 18):
        put(store, number)
        assert number in kept(tmp_path, (number,))
    assert kept(tmp_path, range(8)) == set()


def test_no_more_files_are_remembered_than_the_bound(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated(make_store("disk", 64), tmp_path, {number: 1000.0 - number for number in range(64)})
    monkeypatch.setattr(disk_index, "MAX_FILES", 16)
    settled(make_store("disk", 64))
    assert 12 <= len(files(tmp_path)) <= 16


def test_files_that_others_have_removed_are_no_failure(make_store: MakeStore, tmp_path: Path) -> None:
    dated(make_store("disk", 64), tmp_path, {number: 1000.0 - number for number in range(64)})
    store = settled(make_store("disk", 64))
    for path in files(tmp_path)[:32]:
        path.unlink()
    put(store, 100)
    assert 100 in kept(tmp_path, (100,))
    assert not store.stats.drops


def test_what_cannot_be_removed_counts_on_and_is_not_tried_at_each_write(
    make_store: MakeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dated(make_store("disk", 64), tmp_path, {number: 1000.0 - number for number in range(64)})
    store = settled(make_store("disk", 64))
    tried: list[Path] = []

    def refuse(path: Path, missing_ok: bool = False) -> None:
        tried.append(path)
        raise PermissionError(errno.EACCES, "read only")

    monkeypatch.setattr(Path, "unlink", refuse)
    for number in range(200, 264):
        put(store, number)
    assert len(tried) == 65, "one pass over all"
    assert not store.stats.drops


def test_one_large_file_of_another_model_does_not_count_for_all(make_store: MakeStore, tmp_path: Path) -> None:
    shape = shape_of("another", LAYOUT)
    dated(make_store("disk", 64, shape=shape), tmp_path, {number: 10.0 for number in range(8)})
    with files(tmp_path)[0].open("ab") as file:
        file.truncate(8 * SHAPE.stored_bytes)
    settled(make_store("disk", 64))
    assert len(files(tmp_path)) == 8


def test_age_holds_for_all_models(make_store: MakeStore, tmp_path: Path) -> None:
    dated(make_store("disk", shape=shape_of("another", LAYOUT)), tmp_path, {1: 1e7, 2: 10.0})
    settled(make_store("disk"))
    assert kept(tmp_path, (1, 2)) == {2}


def test_writes_and_reads_go_on_during_a_scan(make_store: MakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with millions of files delays neither."""
    first = make_store("disk")
    for number in range(40):
        put(first, number)
    left_to_read = threading.Semaphore(0)
    read = disk_index.entries

    def slowly(folder: Path) -> Iterator[tuple[int, os.DirEntry[str]]]:
        assert left_to_read.acquire(timeout=60)
        return read(folder)

    monkeypatch.setattr(disk_index, "entries", slowly)
    store = make_store("disk")
    store.store(name_of(100), memoryview(payload_of(100)), 1.0)
    left_to_read.release(2)
    until(lambda: get(store, name_of(100)) == payload_of(100))
    assert sum(store.holds(name_of(number).sequence_hash) for number in range(40)) < 40
    left_to_read.release(1000)
    settled(store)
    assert all(store.holds(name_of(number).sequence_hash) for number in range(40))


def test_clear_directory_removes_blocks_of_all_models_and_nothing_else(make_store: MakeStore, tmp_path: Path) -> None:
    put(make_store("disk"), 1)
    put(make_store("disk", shape=shape_of("another", LAYOUT)), 2)
    kept = tmp_path / "kv" / "notes.txt"
    kept.write_text("mine")
    assert clear_directory(tmp_path / "kv") == 2
    assert files(tmp_path) == [kept]
    assert clear_directory(tmp_path / "none") == 0


# -- the proof --------------------------------------------------------------------------------------------------------


def test_reasons_of_refusal() -> None:
    name, payload = name_of(1), payload_of(1)
    header = header_of(name, SHAPE, memoryview(payload))
    assert refusal(header, name, SHAPE, memoryview(payload)) is None
    assert refusal(header[:-1], name, SHAPE, memoryview(payload)) == "short"
    assert refusal(b"x" + header[1:], name, SHAPE, memoryview(payload)) == "format"
    assert refusal(header[:9] + b"x" + header[10:], name, SHAPE, memoryview(payload)) == "header"
    assert refusal(header, name._replace(sequence_hash=3), SHAPE, memoryview(payload)) == "hash"
    assert refusal(header, name._replace(parent_hash=3), SHAPE, memoryview(payload)) == "other"
    assert refusal(header, name._replace(tokens=to_bytes((1, 2, 3, 4))), SHAPE, memoryview(payload)) == "tokens"
    assert refusal(header, name, SHAPE, memoryview(b"x" + payload[1:])) == "checksum"
    other = shape_of("another", LAYOUT)
    assert refusal(header, name, other, memoryview(payload)) == "fingerprint"
    assert struct.calcsize("<8s16sQQIIQQ") + 4 * LAYOUT.block_size == len(header), "the format of files that lie there"
