"""``Worker.inspect``: true while a hand-off is open, at both ends; frozen; without the grants' secrets."""

from __future__ import annotations

import pytest
from tests.worker.cluster import cluster, expected, prompt

from kvrelay.handoff.decode_state import DecodeState, GrantState
from kvrelay.handoff.prefill_state import PrefillState


async def test_an_open_hand_off_is_seen_at_both_ends_and_its_end_too():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.delay_polls = 10**9
        client.send("r", prompt(300))
        await shared.until(lambda: prefill.worker.inspect().stats.transfer.num_unfinished > 0)
        here, there = decode.worker.inspect(), prefill.worker.inspect()

        (incoming,), (outgoing,) = here.incoming, there.outgoing
        assert incoming.handoff_id == outgoing.handoff_id
        assert (incoming.state, incoming.request_id, incoming.loans) == (DecodeState.GRANTED, "r", (1,))
        assert (outgoing.state, outgoing.decode_worker_id) == (PrefillState.SENDING, decode.id)
        assert outgoing.has_blocks
        (grant,) = incoming.grants
        assert (grant.worker_id, grant.generation, grant.state) == (prefill.id, 1, GrantState.OUT)
        assert here.loans.keys() == {(incoming.handoff_id, grant.loan)}
        assert len(here.writable_blocks) == here.stats.engine.num_blocks_quarantined == 300 // 16 + 1
        assert (here.num_grants, here.num_requests, there.num_grants, there.queue.num_held) == (1, 1, 0, 1)
        secret = decode.ledger.handoffs[incoming.handoff_id].grants[0].secret
        assert str(secret) not in repr(here)
        assert str(secret) not in repr(there)

        shared.fabric.faults.delay_polls = 0
        prefill.worker.request_drain()
        shared.time_out_transfers()
        assert await client.answer("r") == expected(prompt(300), 8)
        await shared.until(lambda: decode.worker.inspect().incoming == ())
        after = decode.worker.inspect()
        assert (after.loans, after.num_requests, after.writable_blocks) == ({}, 0, frozenset())
        assert (incoming.state, here.stats.decode.num_remote_done) == (DecodeState.GRANTED, 0), "it is a snapshot"
        with pytest.raises(AttributeError):
            after.num_requests = 1
        assert await shared.gone(prefill) is None


async def test_peers_queue_and_lease_are_seen():
    async with cluster() as shared:
        prefill, decode, _ = await shared.pair()
        here, there = decode.worker.inspect(), prefill.worker.inspect()
        assert (here.is_accepting, here.is_pairing, here.queue.is_pulling) == (True, False, False)
        assert (there.is_accepting, there.is_pairing, there.queue.is_pulling) == (False, True, True)
        assert (here.peers.prefill, here.peers.serving) == ({prefill.id}, {decode.id})
        assert here.peers.leased >= {prefill.id}
        assert here.peers.addresses[prefill.id] == prefill.server.address
        assert here.lease.is_listed
        assert (here.lease.lease_id, here.stats.epoch) == ((await decode.status())["lease_id"], 0)
        assert not here.is_stalled
