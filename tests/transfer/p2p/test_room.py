"""Room for messages: buffer first, then the pool, then back-pressure, then loss; and nothing is lost of the room."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.transfer.p2p.room import MIN_BLOCK_BYTES, Reservation, Room, RoomQueue

B = MIN_BLOCK_BYTES


class Got(list[Reservation | None]):
    """What ``ask`` has led to."""

    def __call__(self, reservation: Reservation | None) -> None:
        self.append(reservation)


def test_the_buffer_is_used_first_and_what_does_not_fit_spills() -> None:
    room = Room(2 * B, 4 * B)
    first, second, third = room.reserve(2 * B), room.reserve(4 * B), room.reserve(1)
    assert first is not None
    assert second is not None
    assert (first.is_spilled, second.is_spilled, third) == (False, True, None)
    assert (room.num_spilled, room.num_spilled_bytes) == (1, 4 * B)
    used = room.buffer.buddy.used_bytes, room.pool.buddy.used_bytes
    assert (*used, room.largest_bytes) == (2 * B, 4 * B, 4 * B)
    first.tensor.fill_(1)
    second.tensor.fill_(2)
    assert int(first.tensor.sum()) == 2 * B
    room.release(first)
    assert room.reserve(B).is_spilled is False  # type: ignore[union-attr]
    room.check_integrity()


def test_a_device_without_memory_leaves_its_messages_to_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it has some again; nothing is reserved of a buffer that is not there."""
    is_full = True

    def empty(num_bytes: int, device: str, *, is_host: bool) -> torch.Tensor:
        if is_full and not is_host:
            raise RuntimeError("CUDA out of memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr("kvrelay.transfer.p2p.room.empty_bytes", empty)
    room = Room(4 * B, 2 * B)
    first, second = room.reserve(2 * B), room.reserve(2 * B)
    room.check_integrity()
    assert first is not None
    assert (first.is_spilled, second) == (True, None)
    is_full = False
    third = room.reserve(2 * B)
    assert third is not None
    assert not third.is_spilled
    room.check_integrity()


def test_a_buffer_of_one_byte_sends_everything_through_the_pool() -> None:
    room = Room(1, 2 * B)
    reservation = room.reserve(100)
    assert reservation is not None
    assert reservation.is_spilled


def test_who_waits_is_served_in_order_and_what_cannot_fit_is_lost_at_once() -> None:
    queue, got = RoomQueue(Room(2 * B, 0)), [Got() for _ in range(4)]
    queue.ask("a", 2 * B, got[0])
    queue.ask("b", 2 * B, got[1])
    queue.ask("c", B, got[2], deadline_s=5.0)
    queue.ask("d", 2 * B + 1, got[3])
    assert got[3] == [None]
    assert (queue.num_waiting, queue.num_waited, queue.num_lost, queue.next_deadline_s) == (2, 2, 1, 5.0)
    queue.release(got[0][0])  # type: ignore[arg-type]
    assert got[1]
    assert not got[2], "a smaller message does not overtake"
    queue.expire(4.9)
    assert not got[2]
    queue.expire(5.0)
    assert got[2] == [None]
    assert queue.num_lost == 2
    queue.release(got[1][0])  # type: ignore[arg-type]
    assert queue.room.num_reserved == 0


def test_a_cancelled_wait_makes_way() -> None:
    queue, got = RoomQueue(Room(2 * B, 0)), [Got() for _ in range(3)]
    queue.ask("a", B, got[0])
    queue.ask("b", 2 * B, got[1])
    queue.ask("c", B, got[2])
    queue.cancel("b")
    assert not got[1]
    assert got[2]
    queue.room.check_integrity()


@given(st.lists(st.tuples(st.sampled_from(["ask", "release", "cancel", "expire"]), st.integers(1, 9 * B)), max_size=60))
def test_every_request_ends_once_and_all_room_comes_back(program: list[tuple[str, int]]) -> None:
    queue = RoomQueue(Room(4 * B, 8 * B))
    asked: dict[int, Got] = {}
    cancelled: set[int] = set()
    out: list[Reservation] = []
    released: set[int] = set()

    def release(reservation: Reservation) -> None:
        released.add(id(reservation))
        queue.release(reservation)

    def held() -> list[Reservation]:
        given = [each for got in asked.values() for each in got if each is not None]
        return [each for each in given if id(each) not in released]

    for now, (step, size) in enumerate(program):
        if step == "ask":
            asked[now] = Got()
            queue.ask(now, size, asked[now], deadline_s=now + size % 7 if size % 2 else None)
        elif step == "release" and out:
            release(out.pop(size % len(out)))
        elif step == "cancel" and asked:
            key = sorted(asked)[size % len(asked)]
            cancelled |= set() if asked[key] else {key}
            queue.cancel(key)
        elif step == "expire":
            queue.expire(now)
        taken = {id(each) for each in out}
        out += [each for each in held() if id(each) not in taken]
        queue.room.check_integrity()
        assert all(len(got) <= 1 for got in asked.values())
    for _ in range(len(asked) + 1):
        while out:
            release(out.pop())
        out = held()
    queue.expire(10**9)
    assert queue.num_waiting == 0
    assert queue.room.num_reserved == 0
    assert all(bool(got) != (key in cancelled) for key, got in asked.items())
