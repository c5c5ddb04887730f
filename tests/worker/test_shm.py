"""Workers over shared memory: one that stops in the middle of a copy holds its target back, whatever time passes."""

from __future__ import annotations

import asyncio
import threading

from tests.worker.cluster import WAIT_S, cluster, expected, expire_lease, prompt

from kvrelay.config import TransferConfig
from kvrelay.control.base import WatchEvent, WatchKind
from kvrelay.errors import TransferError
from kvrelay.handoff.base import Tick
from kvrelay.transfer.shm.transport import ShmTransport
from kvrelay.worker.cluster.fencing import LeaseEnds

SHM = TransferConfig(transport="shm", transfer_timeout_s=3.0)


class HeldCopy:
    """The transport's own copy, held between two pieces (or in front of a single one): as SIGSTOP would."""

    def __init__(self, transport: ShmTransport) -> None:
        self._copy = transport.copy
        transport.copy = self
        self.is_held, self.go_on = threading.Event(), threading.Event()

    def __call__(self, write_at, write_offsets, read_at, read_offsets, lengths) -> None:
        first = len(lengths) // 2
        self._copy(write_at, write_offsets[:first], read_at, read_offsets[:first], lengths[:first])
        self.is_held.set()
        assert self.go_on.wait(WAIT_S)
        self._copy(write_at, write_offsets[first:], read_at, read_offsets[first:], lengths[first:])


async def test_workers_hand_over_through_shared_memory():
    async with cluster(transfer=SHM) as shared:
        prefill, _, client = await shared.pair()
        for number in range(3):
            client.send(f"r{number}", prompt(900, number))
            assert await client.answer(f"r{number}") == expected(prompt(900, number), 8)
        await shared.check_idle()
        assert prefill.worker.stats().prefill.num_prefills == 3


async def test_blocks_under_a_copy_that_is_stopped_stay_quarantined_beyond_every_lease():
    async with cluster(transfer=SHM) as shared:
        prefill, decode, client = await shared.pair()
        held = HeldCopy(prefill.transport)
        client.send("r", prompt(900))
        assert await asyncio.to_thread(held.is_held.wait, WAIT_S)
        await expire_lease(prefill)
        await shared.until(lambda: len(decode.worker.inspect().peers.held_ends) == 1)
        # A stopped process is silent, which ends its connections; the request is computed here.
        for peer in [peer for peer in decode.server.peers if prefill.id in decode.server.identity(peer)]:
            decode.server.disconnect(peer)
        assert await client.answer("r") == expected(prompt(900), 8)
        # Three times as long as the time after which a worker that cannot be asked is fenced.
        shared.clock.skip(3 * shared.control.lease_ttl_s)
        decode.worker.decode.handoffs.handle(Tick())
        assert prefill.id in decode.worker.inspect().peers.leased
        assert decode.core.metrics().num_blocks_in_use > 0
        held.go_on.set()
        await shared.until(lambda: decode.core.metrics().num_blocks_in_use == 0)
        await shared.until(lambda: len(decode.worker.inspect().peers.held_ends) == 0)
        # The worker has a lease again, so it may write again.
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        client.send("again", prompt(700, 5))
        assert await client.answer("again") == expected(prompt(700, 5), 8)


class Transfer:
    """Stands in for the transfer thread: answers ``bar`` as it is told."""

    def __init__(self) -> None:
        self.answers: list[bool | Exception] = []
        self.calls: list[str] = []

    def bar(self, worker_id: str) -> asyncio.Future[bool]:
        self.calls.append(f"bar {worker_id}")
        answer = self.answers.pop(0) if self.answers else True
        if isinstance(answer, Exception):
            raise answer
        future = asyncio.get_running_loop().create_future()
        future.set_result(answer)
        return future

    def admit(self, worker_id: str) -> None:
        self.calls.append(f"admit {worker_id}")


async def test_an_entry_put_again_waits_behind_its_end_and_others_do_not():
    transfer, told = Transfer(), []
    ends = LeaseEnds(transfer, "kv/", lambda event: told.append((event.kind, event.key)))
    transfer.answers = [False, False]
    ends.on_event(WatchEvent(WatchKind.DELETE, "kv/a/0", b""))
    ends.on_event(WatchEvent(WatchKind.PUT, "kv/a/0", b"new"))
    ends.on_event(WatchEvent(WatchKind.PUT, "kv/b/0", b""))
    assert told == [(WatchKind.PUT, "kv/b/0")]
    async with asyncio.timeout(WAIT_S):
        while len(ends.held):
            await asyncio.sleep(0.01)
    assert told[1:] == [(WatchKind.DELETE, "kv/a/0"), (WatchKind.PUT, "kv/a/0")]
    assert transfer.calls == ["admit b", "bar a", "bar a", "bar a", "admit a"]
    await ends.close()


async def test_a_refused_entry_behind_an_end_does_not_keep_the_next():
    told = []

    def on_change(event: WatchEvent) -> None:
        told.append(event.value)
        if event.value == b"bad":
            raise ValueError("no entry")

    transfer = Transfer()
    ends = LeaseEnds(transfer, "kv/", on_change)
    for kind, value in ((WatchKind.DELETE, b""), (WatchKind.PUT, b"bad"), (WatchKind.PUT, b"good")):
        ends.on_event(WatchEvent(kind, "kv/a/0", value))
    async with asyncio.timeout(WAIT_S):
        while len(ends.held):
            await asyncio.sleep(0.01)
    assert told == [b"", b"bad", b"good"]
    transfer.answers = [TransferError("closed")]
    ends.on_event(WatchEvent(WatchKind.DELETE, "kv/a/0", b""))
    await asyncio.sleep(0)
    await ends.close()
    assert told[3:] == [], "a worker that leaves has ended nobody's lease"
