"""Prefill-first: the prefill worker answers with the first token, the decode worker goes on from its KV.

Two production workers in one process and a client that sends both their half, as a frontend does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from tests.worker.cluster import LOOPBACK, WAIT_S, Client, Cluster, Node, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.handoff import HandoffOrder, Pair
from kvrelay.core.messages import AbortRequest, GenerateRequest, PrefillLost
from kvrelay.core.pair_id import PairId, new_pair_id
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import FinishReason
from kvrelay.core.token_ids import to_bytes
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import HandoffClaim


@dataclass
class PairedClient:
    """A frontend's connections to both workers of a pair."""

    shared: Cluster
    prefill: Node
    decode: Node
    to_prefill: Client
    to_decode: Client

    def new_id(self) -> PairId:
        return new_pair_id("cmpl", self.prefill.server.address, self.decode.server.address)

    def halves(
        self,
        tokens: tuple[int, ...],
        max_tokens: int = 8,
        pair_id: PairId | None = None,
        begins_within_s: float = 0.0,
        **settings: object,
    ) -> tuple[GenerateRequest, GenerateRequest]:
        """The messages to P and to D."""
        request = GenerateRequest(
            str(pair_id or self.new_id()),
            self.prefill.id,
            to_bytes(tokens),
            SamplingParams(max_tokens=max_tokens, temperature=0.0, **settings),
            order=HandoffOrder.PREFILL_FIRST,
            pair=Pair(self.prefill.id, self.decode.id, begins_within_s),
        )
        return request, msgspec.structs.replace(request, worker_id=self.decode.id)

    def send(self, tokens: tuple[int, ...], max_tokens: int = 8, **settings: Any) -> str:
        to_prefill, to_decode = self.halves(tokens, max_tokens, **settings)
        self.to_prefill.connection.send(to_prefill)
        self.to_decode.connection.send(to_decode)
        return to_prefill.request_id

    def abort(self, request_id: str) -> None:
        for client in (self.to_prefill, self.to_decode):
            client.connection.send(AbortRequest(request_id))

    async def first(self, request_id: str) -> list[int]:
        await self.to_prefill.until(lambda: request_id in self.to_prefill.tokens)
        return self.to_prefill.tokens[request_id]

    async def answer(self, request_id: str) -> list[int]:
        return await self.to_decode.answer(request_id)

    @property
    def num_remote(self) -> int:
        return self.decode.worker.stats().decode.num_remote_done


@asynccontextmanager
async def paired(**settings: Any) -> AsyncIterator[PairedClient]:
    async with cluster(**settings) as shared:
        prefill, decode, client = await shared.pair()
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        yield PairedClient(shared, prefill, decode, await shared.client(prefill), client)


async def test_the_first_token_comes_from_the_prefill_worker_and_all_from_the_decode_worker():
    async with paired() as pair:
        for number, length in enumerate([1, 15, 16, 17, 300, 1000]):
            tokens = prompt(length, number)
            request_id = pair.send(tokens)
            assert await pair.answer(request_id) == expected(tokens, 8)
            assert await pair.first(request_id) == expected(tokens, 1)
        assert pair.num_remote == 6
        assert pair.decode.worker.stats().decode.places == {"remote": 6}
        await pair.shared.check_idle()
        assert pair.prefill.worker.stats().prefill.num_prefills == 6
        assert pair.prefill.worker.inspect().num_paired == 0


async def test_blocks_that_the_decode_worker_holds_are_not_sent():
    async with paired() as pair:
        base = prompt(160)
        await pair.answer(pair.send(base))
        before = pair.prefill.worker.stats().prefill.num_sent_bytes
        longer = base + prompt(32, 5)
        assert await pair.answer(pair.send(longer)) == expected(longer, 8)
        sent = pair.prefill.worker.stats().prefill.num_sent_bytes - before
        block_bytes = pair.decode.core.executor.kv_layout.block_bytes
        assert sent == block_bytes * 2


async def test_many_at_once_with_shared_prefixes():
    async with paired(transfer=replace(LOOPBACK, transfer_timeout_s=WAIT_S)) as pair:
        prompts = [prompt(40 + 31 * (n % 13), n % 3) for n in range(60)]
        sent = [(pair.send(tokens), tokens) for tokens in prompts]
        for request_id, tokens in sent:
            assert await pair.answer(request_id) == expected(tokens, 8)
        assert pair.num_remote == 60


async def test_without_a_pair_the_decode_worker_prefills():
    async with paired() as pair:
        message = GenerateRequest(
            "alone",
            pair.decode.id,
            to_bytes(prompt(300)),
            SamplingParams(max_tokens=8, temperature=0.0),
            order=HandoffOrder.PREFILL_FIRST,
        )
        pair.to_decode.connection.send(message)
        assert await pair.answer("alone") == expected(prompt(300), 8)
        assert pair.decode.worker.stats().decode.places == {"local_unpaired": 1}


@pytest.mark.parametrize("late", ["prefill", "decode"])
async def test_either_half_may_come_late(late: str):
    async with paired() as pair:
        to_prefill, to_decode = pair.halves(prompt(300))
        if late == "decode":
            pair.to_prefill.connection.send(to_prefill)
            assert await pair.first(to_prefill.request_id) == expected(prompt(300), 1)
            pair.to_decode.connection.send(to_decode)
        else:
            pair.to_decode.connection.send(to_decode)
            await pair.shared.until(lambda: pair.decode.ledger.num_open == 1)
            pair.to_prefill.connection.send(to_prefill)
        assert await pair.answer(to_decode.request_id) == expected(prompt(300), 8)


async def test_a_decode_worker_without_room_makes_the_kv_wait_not_the_client():
    """Its request waits for blocks, and so does the claim; the first token does not."""
    async with cluster() as shared:
        prefill = await shared.join(WorkerRole.PREFILL)
        decode = await shared.join(WorkerRole.DECODE, num_blocks=40)
        await shared.acquainted(prefill, decode)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        client = await shared.client(decode)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), client)
        decode.slow_down(0.01)
        first = pair.send(prompt(400), max_tokens=120)
        await pair.first(first)
        second = pair.send(prompt(400, 5), max_tokens=8)
        assert await pair.first(second) == expected(prompt(400, 5), 1)
        assert second not in client.tokens
        assert await pair.answer(first) == expected(prompt(400), 120)
        assert await pair.answer(second) == expected(prompt(400, 5), 8)
        assert pair.num_remote == 2


async def test_the_last_token_may_be_the_first():
    async with paired() as pair:
        request_id = pair.send(prompt(300), max_tokens=1)
        await pair.first(request_id)
        assert pair.to_prefill.last[request_id].finish_reason is FinishReason.LENGTH
        assert await pair.answer(request_id) == expected(prompt(300), 1)
        (token,) = expected(prompt(300, 1), 1)
        request_id = pair.send(prompt(300, 1), stop_token_ids=(token,))
        await pair.first(request_id)
        output = pair.to_prefill.last[request_id]
        assert (output.finish_reason, output.stop_token) == (FinishReason.STOP, token)
        await pair.to_decode.until(lambda: request_id in pair.to_decode.last)
        again = msgspec.structs.replace(pair.to_decode.last[request_id], marks=b"")
        assert again == msgspec.structs.replace(output, num_cached_tokens=0)


async def test_continued_requests_go_on_from_where_they_stood():
    async with paired() as pair:
        known = tuple(expected(prompt(300), 5))
        halves = [
            msgspec.structs.replace(half, output_token_ids=known) for half in pair.halves(prompt(300), max_tokens=8)
        ]
        for client, half in zip((pair.to_prefill, pair.to_decode), halves):
            client.connection.send(half)
        request_id = halves[0].request_id
        assert await pair.answer(request_id) == expected(prompt(300), 8)[5:]
        assert await pair.first(request_id) == expected(prompt(300), 6)[5:]


# -- what goes wrong --------------------------------------------------------------------------------------------------


async def test_aborts_at_every_stage_free_everything():
    async with paired() as pair:
        for number in range(40):
            request_id = pair.send(prompt(500 + number, number), max_tokens=200)
            await asyncio.sleep(0.001 * (number % 8))
            pair.abort(request_id)
        after = pair.send(prompt(400, 3))
        assert await pair.answer(after) == expected(prompt(400, 3), 8)


async def test_a_half_that_is_aborted_alone_leaves_the_other_to_itself():
    async with paired() as pair:
        go_on = pair.prefill.hold_steps()
        request_id = pair.send(prompt(2000))
        await pair.shared.until(lambda: pair.decode.ledger.num_grants == 1)
        pair.to_prefill.connection.send(AbortRequest(request_id))
        await pair.shared.until(lambda: pair.decode.ledger.num_grants == 0)
        go_on.set()
        assert await pair.answer(request_id) == expected(prompt(2000), 8)
        assert pair.num_remote == 0
        assert request_id not in pair.to_prefill.tokens


async def test_a_frontend_that_disconnects_cancels_both_halves():
    async with paired() as pair:
        for number in range(8):
            pair.send(prompt(300, number), max_tokens=3000)
        await pair.to_decode.until(lambda: len(pair.to_decode.tokens) > 2)
        await pair.to_prefill.connection.close()
        await pair.to_decode.connection.close()
        await pair.shared.until(lambda: pair.decode.worker.inspect().num_requests == 0)


async def test_failed_and_lost_transfers_lead_to_local_prefill():
    async with paired() as pair:
        for fault in ("fail_next", "drop_next"):
            setattr(pair.shared.fabric.faults, fault, 1)
            request_id = pair.send(prompt(300, len(fault)))
            await pair.shared.until(lambda: pair.shared.fabric.faults.drop_next == 0)
            pair.shared.time_out_transfers()
            assert await pair.answer(request_id) == expected(prompt(300, len(fault)), 8)
            # A write that fails early stops the prefill before its first token.
            await pair.to_prefill.until(
                lambda request_id=request_id: (
                    request_id in pair.to_prefill.tokens or request_id in pair.to_prefill.refused
                )
            )
        assert pair.num_remote == 0
        assert await pair.answer(pair.send(prompt(300, 3))) == expected(prompt(300, 3), 8)
        assert pair.num_remote == 1


async def test_late_and_reordered_writes():
    async with paired() as pair:
        pair.shared.fabric.faults.delay_polls = 20
        pair.shared.fabric.faults.reorder = True
        ids = [pair.send(prompt(700, number)) for number in range(10)]
        for number in range(0, 10, 2):
            pair.abort(ids[number])
        for number in range(1, 10, 2):
            assert await pair.answer(ids[number]) == expected(prompt(700, number), 8)


async def test_a_prompt_that_its_prefill_worker_has_not_begun_in_time_is_taken_back():
    async with cluster() as shared:
        prefill = await shared.join(WorkerRole.PREFILL, max_num_seqs=1)
        decode = await shared.join(WorkerRole.DECODE)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), await shared.client(decode))
        may_go_on, asked = prefill.hold_steps(), prefill.count_posts()
        first = pair.send(prompt(300))
        await shared.until(lambda: prefill.is_held)
        second = pair.send(prompt(300, 5), begins_within_s=0.05)
        await shared.until(lambda: "_recall" in asked)
        may_go_on.set()
        assert await pair.answer(second) == expected(prompt(300, 5), 8)
        assert await pair.answer(first) == expected(prompt(300), 8)
        assert decode.ledger.counters.ends == {EndReason.RECALLED: 1}
        assert not decode.ledger.conduct.failures
        assert set(pair.to_prefill.refused) == {second}


async def test_what_a_prefill_worker_has_begun_is_not_taken_back():
    async with paired() as pair:
        may_go_on, asked = pair.prefill.hold_steps(), pair.prefill.count_posts()
        to_prefill, to_decode = pair.halves(prompt(300), begins_within_s=0.05)
        pair.to_prefill.connection.send(to_prefill)
        await pair.shared.until(lambda: pair.prefill.is_held)
        pair.to_decode.connection.send(to_decode)
        await pair.shared.until(lambda: "_recall" in asked)
        may_go_on.set()
        assert await pair.answer(to_decode.request_id) == expected(prompt(300), 8)
        assert pair.num_remote == 1
        assert not pair.decode.ledger.counters.ends


@pytest.mark.parametrize("when", ["before the first token", "after it"])
async def test_a_killed_prefill_worker_costs_time_only(when: str):
    async with paired() as pair:
        pair.shared.fabric.faults.delay_polls = 200
        if when == "before the first token":
            pair.prefill.slow_down(0.2)
        ids = [pair.send(prompt(600, number)) for number in range(4)]
        if when == "before the first token":
            await pair.shared.until(lambda: pair.decode.ledger.num_grants > 0)
        else:
            await pair.first(ids[0])
        await pair.prefill.kill(pair.shared)
        await pair.shared.bury(pair.prefill)
        for number, request_id in enumerate(ids):
            assert await pair.answer(request_id) == expected(prompt(600, number), 8)
        await pair.shared.until(lambda: pair.decode.core.metrics().num_blocks_in_use == 0)


async def test_a_prefill_worker_that_never_claims_is_not_waited_for_once_the_frontend_says_so():
    async with paired() as pair:
        _, to_decode = pair.halves(prompt(300))
        pair.to_decode.connection.send(to_decode)
        await pair.shared.until(lambda: pair.decode.ledger.num_open == 1)
        pair.to_decode.connection.send(PrefillLost(to_decode.request_id))
        assert await pair.answer(to_decode.request_id) == expected(prompt(300), 8)
        pair.to_decode.connection.send(PrefillLost(to_decode.request_id))
        pair.to_decode.connection.send(PrefillLost("unknown"))


async def test_a_prefill_that_is_never_claimed_is_taken_back():
    async with paired() as pair:
        _, to_decode = pair.halves(prompt(300))
        pair.to_decode.connection.send(to_decode)
        await pair.shared.until(lambda: pair.decode.ledger.num_open == 1)
        pair.shared.clock.skip(pair.shared.disagg.remote_prefill_timeout_s)
        assert await pair.answer(to_decode.request_id) == expected(prompt(300), 8)


async def test_a_claim_in_anothers_name_gets_nothing():
    """Whoever guesses the id of a request still has to be its prefill worker."""
    async with paired() as pair:
        other = await pair.shared.join(WorkerRole.PREFILL)
        await pair.shared.until(lambda: len(pair.decode.worker.inspect().peers.prefill) == 2)
        pair_id = pair.new_id()
        _, to_decode = pair.halves(prompt(300), pair_id=pair_id)
        pair.to_decode.connection.send(to_decode)
        await pair.shared.until(lambda: pair.decode.ledger.num_open == 1)
        handoff_id = pair_id.handoff_id(pair.decode.id)
        connection = pair.shared.network.client(pair.decode.server.address, other.worker.identity.public_key)
        await connection.start()
        claim = HandoffClaim(handoff_id, other.id, other.worker.inspect().kv_compatibility, term=0)
        connection.send(claim)
        connection.send(msgspec.structs.replace(claim, prefill_worker_id=pair.prefill.id))
        await pair.shared.until(lambda: pair.decode.ledger.counters.num_refused == 1)
        assert pair.decode.ledger.num_grants == 0
        pair.to_decode.connection.send(PrefillLost(to_decode.request_id))
        assert await pair.answer(to_decode.request_id) == expected(prompt(300), 8)


async def test_ids_that_do_not_fit_are_refused():
    async with paired() as pair:
        good = pair.new_id()
        wrong = [
            "cmpl-1",
            str(good).replace("cmpl-", "x-"),
            str(new_pair_id("cmpl", pair.prefill.server.address, "tcp://loopback:9")),
        ]
        for request_id in wrong:
            to_prefill, to_decode = (
                msgspec.structs.replace(half, request_id=request_id) for half in pair.halves(prompt(300))
            )
            pair.to_prefill.connection.send(to_prefill)
            pair.to_decode.connection.send(to_decode)
            for client in (pair.to_prefill, pair.to_decode):
                await client.until(lambda client=client, request_id=request_id: request_id in client.refused)
                assert (client.refused[request_id].status, client.refused[request_id].retryable) == (400, False)
        halves = pair.halves(prompt(300), pair_id=good)
        for client, half in zip((pair.to_prefill, pair.to_decode), halves):
            client.connection.send(half)
            client.connection.send(half)
            await client.until(lambda client=client: str(good) in client.refused)
        assert pair.num_remote <= 1


async def test_a_prefill_worker_that_leaves_finishes_what_it_has_and_takes_nothing_new():
    async with paired() as pair:
        pair.prefill.slow_down(0.1)
        ids = [pair.send(prompt(600, number)) for number in range(4)]
        await pair.shared.until(lambda: len(pair.prefill.outgoing.handoffs) == 4)
        pair.prefill.worker.request_drain()
        await pair.shared.until(lambda: not pair.prefill.worker.inspect().is_pairing)
        late = pair.send(prompt(300, 9))
        await pair.to_prefill.until(lambda: late in pair.to_prefill.refused)
        assert pair.to_prefill.refused[late].retryable
        pair.to_decode.connection.send(PrefillLost(late))
        for number, request_id in enumerate(ids):
            assert await pair.answer(request_id) == expected(prompt(600, number), 8)
        assert await pair.answer(late) == expected(prompt(300, 9), 8)
        assert pair.num_remote == 4
        await pair.prefill.running
        await pair.prefill.control.close()
        pair.shared.nodes.remove(pair.prefill)


async def test_roles_change_while_pairs_are_at_work():
    async with paired() as pair:
        ids = [pair.send(prompt(400, number)) for number in range(4)]
        await pair.shared.until(lambda: len(pair.prefill.outgoing.handoffs) > 0)
        await pair.prefill.worker.set_role(WorkerRole.DECODE)
        for number, request_id in enumerate(ids):
            assert await pair.answer(request_id) == expected(prompt(400, number), 8)
        refused = pair.send(prompt(300, 9))
        await pair.to_prefill.until(lambda: refused in pair.to_prefill.refused)
        pair.to_decode.connection.send(PrefillLost(refused))
        assert await pair.answer(refused) == expected(prompt(300, 9), 8)


async def test_an_overloaded_prefill_worker_refuses_at_once():
    async with cluster() as shared:
        prefill = await shared.join(WorkerRole.PREFILL, max_num_waiting=1, max_num_seqs=1)
        decode = await shared.join(WorkerRole.DECODE)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), await shared.client(decode))
        prefill.slow_down(0.05)
        ids = [pair.send(prompt(300, number)) for number in range(8)]
        await pair.to_prefill.until(lambda: len(pair.to_prefill.refused) > 0)
        for request_id in ids:
            await pair.to_prefill.until(
                lambda request_id=request_id: (
                    request_id in pair.to_prefill.refused or request_id in pair.to_prefill.tokens
                )
            )
        # On a busy machine one that was taken may be given up later, which is another refusal.
        assert next(iter(pair.to_prefill.refused.values())).status == 429
        for request_id, refusal in pair.to_prefill.refused.items():
            assert refusal.retryable
            pair.to_decode.connection.send(PrefillLost(request_id))
        for number, request_id in enumerate(ids):
            assert await pair.answer(request_id) == expected(prompt(300, number), 8)
        # What its engine has received leaves room for the next one.
        await pair.shared.check_idle()
        later = pair.send(prompt(300, 9))
        assert await pair.first(later) == expected(prompt(300, 9), 1)
