"""However a hand-off ends, the decode worker hears of it, and nothing stays quarantined or unanswered."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.patience import PATIENCE_S
from tests.worker.cluster import VOCAB_SIZE, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.control import redelivery
from kvrelay.control.nats.prefill_queue import NatsPrefillDelivery
from kvrelay.errors import ControlUnavailableError, PayloadTooLargeError, TransferError, WorkerUnavailableError
from kvrelay.executors.mock import MockExecutor
from kvrelay.handoff.base import RefusalReason
from kvrelay.handoff.messages import HandoffClaim, HandoffGrant
from kvrelay.handoff.prefill_state import PrefillState
from kvrelay.worker.prefill import pulling as prefill_side

STUCK = 1_000_000_000


async def test_a_broken_connection_costs_no_blocks_and_no_drain():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.delay_polls = STUCK
        client.send("r", prompt(600))
        await shared.until(lambda: prefill.worker.stats().transfer.num_unfinished > 0)
        decode.server.disconnect(decode.ledger.connections[prefill.id])
        assert await client.answer("r") == expected(prompt(600), 8)
        # Both live: nobody's lease ends, so only a release over a new connection can do this.
        await shared.until(lambda: decode.ledger.num_grants == 0)
        assert decode.ledger.counters.num_fenced == 0
        shared.fabric.faults.delay_polls = 0
        client.send("after", prompt(700, 3))
        assert await client.answer("after") == expected(prompt(700, 3), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)
        decode.worker.request_drain()
        assert await shared.gone(decode) is None


async def test_a_release_waits_until_the_decode_worker_can_be_reached():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.delay_polls = STUCK
        client.send("r", prompt(600))
        await shared.until(lambda: prefill.worker.stats().transfer.num_unfinished > 0)
        shared.network.unlisten(decode.server)
        decode.server.disconnect(decode.ledger.connections[prefill.id])
        assert await client.answer("r") == expected(prompt(600), 8)
        await shared.until(lambda: prefill.outgoing.num_in(PrefillState.RELEASING) == 1)
        assert decode.ledger.num_grants == 1
        shared.network.listen(decode.server)
        await shared.until(lambda: decode.ledger.num_grants == 0)
        await shared.until(lambda: prefill.outgoing.num_in(PrefillState.RELEASING) == 0)


async def cannot_connect(address, public_key):
    raise WorkerUnavailableError("no way from here")


async def test_an_entry_goes_to_a_prefill_worker_that_can_reach_the_decode_worker():
    async with cluster(remote_prefill_timeout_s=PATIENCE_S) as shared:
        astray, decode, client = await shared.pair()
        shared.connectors[astray.id] = cannot_connect
        other = await shared.join(WorkerRole.PREFILL)
        other.worker.prefill.stop()
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 2)
        client.send("r", prompt(600))
        await shared.until(lambda: astray.worker.stats().prefill.num_returned > 0)
        astray.worker.prefill.stop()
        other.worker.prefill.start()
        assert await client.answer("r") == expected(prompt(600), 8)
        assert decode.worker.stats().decode.num_remote_done == 1
        assert astray.outgoing.num_in(PrefillState.RELEASING) == 0


@pytest.mark.parametrize("missing_after", [0, 1], ids=["its key", "its memory"])
async def test_a_prefill_worker_tries_again_once_discovery_has_the_decode_workers_memory(missing_after):
    async with cluster(remote_prefill_timeout_s=PATIENCE_S) as shared:
        prefill, decode, client = await shared.pair()
        load, missing = prefill.control.discovery.get, [0] * missing_after + [1]

        async def lacking(key):
            return None if missing and missing.pop(0) else await load(key)

        prefill.control.discovery.get = lacking
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert prefill.worker.stats().prefill.num_returned == 1
        assert decode.worker.stats().decode.num_remote_done == 1


async def test_a_decode_worker_that_no_one_can_reach_computes_by_itself(monkeypatch):
    monkeypatch.setattr(redelivery, "RETURN_DELAYS_S", (0.01, 0.01))
    async with cluster() as shared:
        prefill, _, client = await shared.pair()
        shared.connectors[prefill.id] = cannot_connect
        client.send("r", prompt(600))
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 1)
        shared.clock.skip(shared.disagg.remote_prefill_timeout_s)
        assert await client.answer("r") == expected(prompt(600), 8)
        assert prefill.worker.stats().prefill.num_returned == 2
        del shared.connectors[prefill.id]
        await shared.until(lambda: prefill.outgoing.num_in(PrefillState.RELEASING) == 0)


async def test_an_entry_whose_claim_may_have_arrived_does_not_go_back():
    """Sending failed, but the decode worker has the claim: another worker would claim it a second time."""
    async with cluster() as shared:
        connect = shared.connect

        async def connecting(*arguments):
            client = await connect(*arguments)
            send = client.send

            def sending(message):
                send(message)
                if isinstance(message, HandoffClaim):
                    raise WorkerUnavailableError("the connection has ended")

            client.send = sending
            return client

        shared.connect = connecting
        prefill, _, client = await shared.pair()
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_failed == 1)
        assert prefill.worker.stats().prefill.num_returned == 0


async def test_the_owner_of_an_expired_entry_hears_at_once_and_computes_it(monkeypatch):
    async with cluster(remote_prefill_timeout_s=PATIENCE_S) as shared:
        prefill, decode, client = await shared.pair()
        expired = property(lambda delivery: True, lambda delivery, value: None)
        monkeypatch.setattr(NatsPrefillDelivery, "is_expired", expired, raising=False)
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert decode.worker.stats().decode.num_remote_done == 0
        await shared.until(lambda: prefill.outgoing.num_in(PrefillState.RELEASING) == 0)


async def test_a_grant_that_cannot_be_sent_is_taken_back_at_once(monkeypatch):
    monkeypatch.setattr(prefill_side, "CLAIM_TIMEOUT_S", 0.2)
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        send = decode.server.send
        decode.server.send = lambda peer, message: not isinstance(message, HandoffGrant) and send(peer, message)
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == 0)
        assert (decode.ledger.num_grants, decode.worker.inspect().num_grants) == (0, 0)


async def test_a_claim_without_an_answer_is_undone(monkeypatch):
    """The grant got lost: the decode worker counts us as a writer, and we do not know under which generation."""
    monkeypatch.setattr(prefill_side, "CLAIM_TIMEOUT_S", 1.0)  # a claim must be granted in this time
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        send = decode.server.send
        decode.server.send = lambda peer, message: isinstance(message, HandoffGrant) or send(peer, message)
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert decode.ledger.counters.num_granted == 1
        await shared.until(lambda: decode.worker.inspect().num_grants == 0)
        assert decode.ledger.num_grants == 0
        assert prefill.worker.stats().prefill.num_failed == 1


async def test_an_abandon_of_something_unknown_is_answered():
    """HandoffDone got lost; only the question after it can free the blocks."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        decode.lose_notifications()
        client.send("r", prompt(600))
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)
        assert decode.ledger.num_grants == 1
        client.abort("r")
        await shared.until(lambda: decode.ledger.num_grants == 0)
        assert decode.ledger.counters.num_fenced == 0


async def test_an_entry_that_is_delivered_twice_is_served_once():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        queue = decode.control.prefill_queue
        push = queue.push

        async def twice(request):
            await push(request)
            await push(request)

        queue.push = twice
        for number in range(5):
            client.send(f"r{number}", prompt(600, number))
            assert await client.answer(f"r{number}") == expected(prompt(600, number), 8)
        assert decode.ledger.counters.num_granted == 5
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 5)


@pytest.mark.parametrize("error", [ControlUnavailableError("away"), PayloadTooLargeError("too large")])
async def test_what_cannot_be_queued_is_computed_here_at_once(error):
    async with cluster() as shared:
        _, decode, client = await shared.pair()

        async def push(request):
            raise error

        decode.control.prefill_queue.push = push
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)


@pytest.mark.parametrize("fault", ["transfer", "compatibility", "model", "defect"])
async def test_what_the_prefill_worker_cannot_do_is_computed_here_at_once(fault, caplog):
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        push = decode.control.prefill_queue.push

        def unreachable(metadata):
            raise TransferError("cannot be reached") if fault == "transfer" else RuntimeError("a defect")

        if fault in ("transfer", "defect"):
            prefill.transport.add_peer = unreachable
        elif fault == "model":
            decode.control.prefill_queue.push = lambda request: push(msgspec.structs.replace(request, model="another"))
        else:
            decode.ledger.rules = msgspec.structs.replace(decode.ledger.rules, kv_compatibility="another")
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        stats = prefill.worker.stats().prefill
        assert (stats.num_failed, stats.num_refused) == ((0, 1) if fault == "compatibility" else (1, 0))
    assert (RefusalReason.INCOMPATIBLE.value in caplog.text) == (fault == "compatibility")


async def test_a_worker_of_another_kind_leaves_our_entries_alone():
    async with cluster() as shared:
        prefill, _, client = await shared.pair()

        def build(config):
            executor = MockExecutor(config, shared.mock, vocab_size=VOCAB_SIZE, max_model_len=4096)
            executor.weights_fingerprint = "another"
            return executor

        other = await shared.join(WorkerRole.PREFILL, build)
        assert other.worker.inspect().kv_compatibility != prefill.worker.inspect().kv_compatibility
        for number in range(6):
            client.send(f"r{number}", prompt(600, number))
        for number in range(6):
            assert await client.answer(f"r{number}") == expected(prompt(600, number), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 6)


async def test_two_first_hand_offs_meet_their_decode_worker_once():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        added = []
        add_peer = prefill.transport.add_peer
        prefill.transport.add_peer = lambda metadata: added.append(metadata.worker_id) or add_peer(metadata)
        client.send("r1", prompt(1000))
        client.send("r2", prompt(1000, 5))
        assert await client.answer("r1") == expected(prompt(1000), 8)
        assert await client.answer("r2") == expected(prompt(1000, 5), 8)
        assert added == [decode.id]
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 2)


async def test_the_load_goes_down_without_a_step():
    """What a release frees is published, though nothing was computed."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.delay_polls = STUCK
        client.send("r", prompt(600))
        await shared.until(lambda: prefill.worker.stats().transfer.num_unfinished > 0)
        loads = await client.loads(decode)
        await shared.until(lambda: loads and loads[-1].num_blocks_in_use > 0)
        client.abort("r")
        shared.fabric.faults.delay_polls = 0
        prefill.worker.transfer.fail_all("enough")
        await shared.until(lambda: loads[-1].num_blocks_in_use == 0)


async def test_an_unexpected_error_at_admission_is_answered():
    async with cluster() as shared:
        node = await shared.join(WorkerRole.BOTH)
        client = await shared.client(node)

        def broken(tokens):
            raise RuntimeError("boom")

        node.core.num_cached_tokens = broken
        client.send("bad", prompt(20))
        await client.until(lambda: "bad" in client.refused)
        assert client.refused["bad"].status == 500
        assert not client.refused["bad"].retryable


async def test_a_role_change_that_cannot_be_told_leaves_everything_as_it_was():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        mend = decode.cut_from_nats()
        with pytest.raises(ControlUnavailableError):
            await decode.worker.set_role(WorkerRole.BOTH)
        assert decode.worker.role is WorkerRole.DECODE
        assert not decode.worker.inspect().queue.is_pulling
        client.send("still here", prompt(20))
        assert await client.answer("still here") == expected(prompt(20), 8)
        mend()
        await decode.worker.set_role(WorkerRole.BOTH)
        entries = await prefill.control.discovery.list("kvrelay/default/workers/")
        assert b'"role":"both"' in entries[f"kvrelay/default/workers/{decode.id}"]
        client.send("there", prompt(600))
        assert await client.answer("there") == expected(prompt(600), 8)


async def test_a_role_change_that_fails_half_way_is_registered_as_soon_as_possible():
    async with cluster() as shared:
        prefill, decode, _ = await shared.pair()
        put = decode.control.discovery.put

        async def failing(key, value, lease=None):
            decode.control.discovery.put = put
            raise ControlUnavailableError("away")

        decode.control.discovery.put = failing
        with pytest.raises(ControlUnavailableError):
            await decode.worker.set_role(WorkerRole.PREFILL)
        assert decode.worker.role is WorkerRole.DECODE
        assert not decode.worker.inspect().queue.is_pulling
        assert decode.worker.inspect().is_accepting
        key = f"kvrelay/default/workers/{decode.id}"
        async with asyncio.timeout(60):
            while (entry := await prefill.control.discovery.get(key)) is None:
                await asyncio.sleep(0.01)
        assert b'"role":"decode"' in entry
