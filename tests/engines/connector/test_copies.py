"""Copies on a stream of their own: late ones, in any order, move the right bytes, and a missing wait shows."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tests.engines.connector.fake_device import DEVICES, FakeDevice, FakeWatch
from tests.engines.connector.layouts import packed_layout
from tests.engines.vllm.staged import LAYOUT, at_once, copy

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector import worker_half
from kvrelay.engines.connector.device import Event, HostDevice
from kvrelay.engines.connector.scheduler_half import Copies, Copy
from kvrelay.engines.connector.terms import REPORT_BYTES, CopyKind, Report, StagingPlace, decode_reports
from kvrelay.engines.connector.worker_half import CompletionThread, RankPart, WorkerHalf

NUM_STAGED, NUM_PAGED, LAYERS = 8, 10, 2
ORDERS = range(30)
WINDOW_LAYOUT = packed_layout(num_layers=2, num_heads=1, block_size=16, head_dim=4, dtype="float32", window=16)


class Rank:
    """A worker half on a device that is late, and what vLLM does around it."""

    def __init__(self, order: int, layout: KVLayout = LAYOUT) -> None:
        self.device, self.watch = FakeDevice(random.Random(order)), FakeWatch()
        self.fd = os.memfd_create("staging")
        os.ftruncate(self.fd, NUM_STAGED * layout.block_bytes)
        self.reader, writer = os.pipe2(os.O_NONBLOCK)
        place = StagingPlace(f"/proc/self/fd/{self.fd}", NUM_STAGED, layout, reports=f"/proc/self/fd/{writer}")
        part = RankPart.of(layout, LAYERS, 0, 1)
        self.half = WorkerHalf(place, part, 0, self.device, self.watch.when_done)
        os.close(writer)
        self.caches = [torch.zeros(NUM_PAGED, 1, 16, 8) for _ in range(LAYERS)]
        self.half.register({f"layers.{number}": cache for number, cache in enumerate(self.caches)})
        size = NUM_STAGED * layout.block_bytes
        self.pool = torch.from_file(place.path, shared=True, size=size // 4).view(NUM_STAGED, LAYERS, 1, 16, 8)

    def compute(self, block: int, value: float) -> None:
        """A forward pass writes a block of each layer."""
        for cache in self.caches:
            self.device.compute.run(lambda cache=cache: cache[block].fill_(value))  # type: ignore[misc]

    def step(self, copies: Copies, forward: Callable[[], object] = lambda: None) -> None:
        num_waits = self.device.num_host_waits
        self.half.begin(copies)
        forward()
        self.half.load(copies)
        self.half.save(copies)
        assert self.device.num_host_waits == num_waits, "a step never waits for the device"
        self.device.run_some()

    def reports(self) -> list[Report]:
        self.watch.look()
        try:
            return list(decode_reports(os.read(self.reader, 100 * REPORT_BYTES)))
        except BlockingIOError:
            return []

    def staged(self, block: int) -> set[float]:
        return set(self.pool[block].flatten().tolist())

    def paged(self, block: int) -> set[float]:
        return {value for cache in self.caches for value in cache[block].flatten().tolist()}

    def until(self, what: Callable[[], bool]) -> None:
        while not what():
            assert self.device.run_one(), "nothing is left to run"


@contextmanager
def _rank(order: int, layout: KVLayout = LAYOUT) -> Iterator[Rank]:
    rank = Rank(order, layout)
    yield rank
    os.close(rank.fd)
    os.close(rank.reader)


def _save(*blocks: tuple[int, int], request: str = "p", frees_blocks: bool = False) -> Copies:
    staged, paged = zip(*blocks)
    return Copies(saves=(Copy(request, staged, (paged,), 7, len(blocks)),), frees_blocks=frees_blocks)


# -- each of these is broken by the mutant of its name ---------------------------------------------------------------


def a_save_waits_for_its_forward_pass(rank: Rank) -> None:
    for number, value in enumerate((1.0, 2.0)):
        rank.step(_save((number, number + 1)), lambda value=value, number=number: rank.compute(number + 1, value))  # type: ignore[misc]
    seen: list[Report] = []
    while len(seen) < 2:
        seen += rank.reports()
        for number in range(len(seen)):
            assert rank.staged(number) == {number + 1.0}, "a block that was reported before it was there"
        rank.device.run_one()


def a_load_waits_for_earlier_forward_passes(rank: Rank) -> None:
    """Asynchronous scheduling: a request has ended, and a forward pass of it is still to come."""
    rank.pool[3] = 5.0
    rank.step(Copies(), lambda: rank.compute(4, 1.0))
    rank.step(Copies(loads=(Copy("d", (3,), ((4,),), 7, 1),)))
    rank.until(lambda: bool(rank.reports()))
    rank.pool[3] = -1.0  # the staging block is another request's
    assert rank.half.take_loaded() == {"d"}
    rank.device.finish()
    assert rank.paged(4) == {5.0}


def a_forward_pass_waits_for_saves_of_a_preempted_request(rank: Rank) -> None:
    rank.step(_save((0, 4)), lambda: rank.compute(4, 1.0))
    rank.step(Copies(frees_blocks=True), lambda: rank.compute(4, 9.0))
    rank.device.finish()
    assert rank.staged(0) == {1.0}


def a_forward_pass_waits_for_saves_of_blocks_outside_of_the_window(rank: Rank) -> None:
    """vLLM frees them while their request is computed."""
    rank.step(_save((0, 4)), lambda: rank.compute(4, 1.0))
    rank.step(Copies(), lambda: rank.compute(4, 9.0))
    rank.device.finish()
    assert rank.staged(0) == {1.0}


def blocks_of_a_request_that_has_ended_are_kept_until_they_are_saved(rank: Rank) -> None:
    rank.step(_save((0, 4)), lambda: rank.compute(4, 1.0))
    finished = {"p", "another"}
    saved: set[str] = set()
    while not saved:
        rank.watch.look()
        saved = rank.half.take_saved(finished)
        finished = set()
        if not saved:
            assert rank.device.run_one()
    assert saved == {"p"}
    rank.compute(4, 9.0)
    rank.device.finish()
    assert rank.staged(0) == {1.0}
    assert rank.half.take_saved(set()) == set()


def nothing_is_under_way_after_drain(rank: Rank) -> None:
    rank.pool[3] = 5.0
    rank.step(_save((0, 4)), lambda: rank.compute(4, 1.0))
    rank.step(Copies(loads=(Copy("d", (3,), ((5,),), 7, 1),)))
    rank.half.drain()
    rank.pool[0], rank.pool[3] = 3.0, 4.0
    rank.device.finish()
    assert (rank.staged(0), rank.paged(5)) == ({3.0}, {5.0})


def a_part_of_a_long_copy_is_told_when_it_is_there_and_the_request_with_the_last(rank: Rank) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_half, "BUFFER_BYTES", LAYOUT.block_bytes)
        rank.step(_save(*((number, number + 1) for number in range(4))), lambda: _compute_all(rank))
        _told_in_parts(rank, lambda: rank.half.take_saved({"p"}), rank.staged, 0)
        assert rank.half.num_copies == 4
        rank.step(Copies(loads=(Copy("d", (0, 1, 2, 3), ((5, 6, 7, 8),), 7, 4),)))
        _told_in_parts(rank, rank.half.take_loaded, rank.paged, 5)


def _compute_all(rank: Rank) -> None:
    for number in range(4):
        rank.compute(number + 1, number + 1.0)


def _told_in_parts(
    rank: Rank, take: Callable[[], set[str]], held: Callable[[int], set[float]], first_block: int
) -> None:
    """Four parts of a block each, from ``first_block`` on, which then holds its number from 1 on."""
    told: list[Report] = []
    while len(told) < 4:
        assert not take()
        is_over = not rank.device.run_one()
        told += rank.reports()
        assert [held(first_block + at) for at in range(len(told))] == [{at + 1.0} for at in range(len(told))]
        assert len(told) == 4 or not is_over
    assert [(report.num_blocks, report.num_bytes) for report in told] == [
        (at, LAYOUT.block_bytes) for at in (1, 2, 3, 4)
    ]
    assert len(take()) == 1


def _without(stream: str) -> Callable[[pytest.MonkeyPatch, Rank], None]:
    """That stream does not wait."""
    return lambda patch, rank: patch.setattr(getattr(rank.device, stream), "wait", lambda event: None)


def _reports_at_once(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    patch.setattr(rank.half, "_watch", lambda event, then: then())


def _every_part_counts_as_the_last(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    names = ("event", "request_id", "report")
    patch.setattr(worker_half, "_Flight", lambda *parts: SimpleNamespace(is_last=True, **dict(zip(names, parts))))


def _does_not_drain(patch: pytest.MonkeyPatch, rank: Rank) -> None:
    patch.setattr(rank.half, "drain", lambda: None)


Scenario = Callable[[Rank], None]
Mutation = Callable[[pytest.MonkeyPatch, Rank], None]
MUTANTS: dict[str, tuple[Scenario, Mutation]] = {
    "save": (a_save_waits_for_its_forward_pass, _without("copies")),
    "report": (a_save_waits_for_its_forward_pass, _reports_at_once),
    "load": (a_load_waits_for_earlier_forward_passes, _without("copies")),
    "loaded": (a_load_waits_for_earlier_forward_passes, _reports_at_once),
    "preempted": (a_forward_pass_waits_for_saves_of_a_preempted_request, _without("compute")),
    "window": (a_forward_pass_waits_for_saves_of_blocks_outside_of_the_window, _without("compute")),
    "finished": (blocks_of_a_request_that_has_ended_are_kept_until_they_are_saved, _reports_at_once),
    "drain": (nothing_is_under_way_after_drain, _does_not_drain),
    "part": (a_part_of_a_long_copy_is_told_when_it_is_there_and_the_request_with_the_last, _reports_at_once),
    "last part": (
        a_part_of_a_long_copy_is_told_when_it_is_there_and_the_request_with_the_last,
        _every_part_counts_as_the_last,
    ),
}


def _layout(scenario: Scenario) -> KVLayout:
    return WINDOW_LAYOUT if "window" in scenario.__name__ else LAYOUT


@pytest.mark.parametrize("name", MUTANTS)
def test_late_copies_in_any_order_move_the_right_bytes(name: str) -> None:
    scenario, _ = MUTANTS[name]
    for order in ORDERS:
        with _rank(order, _layout(scenario)) as rank:
            scenario(rank)


@pytest.mark.parametrize("name", MUTANTS)
def test_a_missing_wait_shows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scenario, mutate = MUTANTS[name]
    num_wrong = 0
    for order in ORDERS:
        with _rank(order, _layout(scenario)) as rank:
            mutate(monkeypatch, rank)
            try:
                scenario(rank)
            except AssertionError:
                num_wrong += 1
    assert num_wrong


# -- counts -----------------------------------------------------------------------------------------------------------

COUNTS = {
    # All heads and layers: one copy for each row of staging blocks, of which (5, 6), (2), (7) are three.
    "tp1-pp1": (1, 1, 3, 4 * 4 * 2 * 96),
    # Half of the layers: one for each block.
    "tp1-pp2": (1, 2, 4, 4 * 2 * 2 * 96),
    # Half of the heads: one for each layer of each block.
    "tp2-pp1": (2, 1, 16, 4 * 4 * 1 * 96),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ranks", COUNTS)
def test_a_rank_copies_its_own_part_once_in_as_few_pieces_as_lie_in_a_row(ranks: str, device: str) -> None:
    """Bytes: blocks x layers x heads x 4 tokens x 6 values of float32. In host memory no buffer is filled."""
    tp, pp, num_pieces, num_bytes = COUNTS[ranks]
    num_copies = 0 if device == "host" else num_pieces
    layout = packed_layout(num_layers=4, num_heads=2, block_size=4, head_dim=3, dtype="float32")
    fd = os.memfd_create("staging")
    os.ftruncate(fd, 8 * layout.block_bytes)
    half = WorkerHalf(
        StagingPlace(f"/proc/self/fd/{fd}", 8, layout),
        RankPart.of(layout, 4 // pp, 0, tp),
        device=DEVICES[device](),
        watch=at_once,
    )
    half.register({f"layers.{number}": torch.rand(9, 2 // tp, 4, 6) for number in range(4 // pp)})
    staged, paged = (5, 6, 2, 7), ((1, 4, 3, 8),)
    copy(half, Copies(saves=(Copy("p", staged, paged),)))
    assert (half.num_copies, half.num_bytes) == (num_copies, num_bytes)
    copy(half, Copies(loads=(Copy("d", staged, paged),)))
    assert (half.num_copies, half.num_bytes) == (2 * num_copies, 2 * num_bytes)
    os.close(fd)


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tokens before heads": lambda kv: kv.transpose(1, 2).contiguous().transpose(1, 2),
    "blocks in halves": lambda kv: kv.unflatten(2, (2, 2)).transpose(1, 2).flatten(0, 1),
}
"""Of [block, head, token, value]: how vLLM's attention on a GPU may have it."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_order_in_which_attention_has_its_kv_is_copied_token_by_token(name: str, device: str) -> None:
    """One worker's attention has it so; the other's as it is in the pool."""
    layout = packed_layout(num_layers=2, num_heads=3, block_size=4, head_dim=3, dtype="float32")
    fd = os.memfd_create("staging")
    os.ftruncate(fd, 8 * layout.block_bytes)
    place, part = StagingPlace(f"/proc/self/fd/{fd}", 8, layout), RankPart.of(layout, 2, 0, 1)
    kv = torch.rand(2, 9, 3, 4, 6)
    target = torch.zeros_like(kv)
    halves = []
    for caches in ([LAYOUTS[name](layer) for layer in kv], list(target)):
        half = WorkerHalf(place, part, device=DEVICES[device](), watch=at_once)
        half.register({f"layers.{number}": cache for number, cache in enumerate(caches)})
        halves.append(half)
    copy(halves[0], Copies(saves=(Copy("p", (5, 6, 2), ((1, 4, 3),)),)))
    copy(halves[1], Copies(loads=(Copy("d", (2, 6), ((7, 8),)),)))
    assert torch.equal(target[:, [7, 8]], kv[:, [3, 4]])
    # And back, to where other KV was.
    other = [LAYOUTS[name](torch.zeros(9, 3, 4, 6)) for _ in range(2)]
    half = WorkerHalf(place, part, device=DEVICES[device](), watch=at_once)
    half.register({f"layers.{number}": cache for number, cache in enumerate(other)})
    copy(half, Copies(loads=(Copy("d", (5,), ((4,),)),)))
    expected = torch.zeros(2, 9, 3, 4, 6)
    expected[:, 4] = kv[:, 1]
    assert all(torch.equal(found, LAYOUTS[name](layer)) for found, layer in zip(other, expected))
    os.close(fd)


def test_the_pool_is_pinned_once_and_a_report_says_what_was_copied() -> None:
    with _rank(1) as rank:
        assert [pool.nbytes for pool in rank.device.pinned] == [NUM_STAGED * LAYOUT.block_bytes]
        rank.step(_save((0, 4), (1, 5)))
        rank.device.finish()
        (report,) = rank.reports()
        assert report[:5] == (7, 0, CopyKind.SAVE, 2, 2 * LAYOUT.block_bytes)
        assert 0 < report.began_s <= report.ended_s


def test_a_thread_tells_of_events_in_their_order() -> None:
    """The one that is used with a GPU."""
    order: list[int] = []
    thread = CompletionThread()
    done: Event = HostDevice().record()
    over = threading.Event()
    for number in range(3):
        thread.when_done(done, lambda number=number: order.append(number))  # type: ignore[misc]
    thread.when_done(done, over.set)
    assert over.wait(30)
    assert order == [0, 1, 2]
