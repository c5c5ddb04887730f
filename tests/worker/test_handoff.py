"""Prefill here, decode there: two production workers in one process, and everything that can come between them."""

from __future__ import annotations

import asyncio
import logging
import threading

import msgspec
import pytest
from tests.executors.sitting_out import sit_out
from tests.patience import PATIENCE_S, until
from tests.worker.cluster import VOCAB_SIZE, Node, cluster, expected, expire_lease, prompt

from kvrelay.config import EngineConfig, MockConfig, WorkerRole
from kvrelay.core.grammar import Grammar, GrammarKind
from kvrelay.core.handoff import HandoffId
from kvrelay.engine.step import ModelOutput, SchedulerOutput
from kvrelay.errors import ConfigError, InvalidInputError
from kvrelay.executors.grammars import GrammarMasks
from kvrelay.executors.mock import MockExecutor
from kvrelay.handoff.base import EndReason
from kvrelay.handoff.messages import HandoffDone, HandoffGrant
from kvrelay.placement.base import PrefillPlace
from kvrelay.rpc.wire import encode_message
from kvrelay.worker.cluster.peers import PeerTable

OUTGOING_LOG = "kvrelay.worker.sides.prefill"


def ends_logged(caplog: pytest.LogCaptureFixture) -> list[tuple[int, EndReason]]:
    """Level and reason of each hand-off whose end a prefill worker has logged; fails if it has logged anything else."""
    records = [record for record in caplog.records if record.name == OUTGOING_LOG]
    return [(record.levelno, EndReason(record.getMessage().partition(": ")[2])) for record in records]


async def test_long_prompts_are_prefilled_remotely_and_short_ones_locally():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        for number, length in enumerate([1, 16, 64, 65, 300, 1000, 3000]):
            client.send(str(number), prompt(length, number))
            assert await client.answer(str(number)) == expected(prompt(length, number), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 4)
        stats = decode.worker.stats().decode
        assert (stats.num_remote_done, stats.places["local_short"], stats.places["remote"]) == (4, 3, 4)
        assert stats.num_received_bytes >= (65 + 300 + 1000 + 3000) * 8


async def test_the_transfer_thread_sleeps_while_a_prefill_that_is_pushed_is_computed():
    """Only the decode worker polls: its memory is written. Polls at the other side would disturb the step."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        polled = []
        prefill.transport.before.append(lambda _: polled.append((_polls(prefill), _polls(decode))))
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert polled
        assert set(polled) == {(0, 1)}


def _polls(node: Node) -> int:
    """The hand-offs for which its transfer thread polls."""
    return node.worker.stats().transfer.num_open_handoffs


async def test_many_at_once_with_shared_prefixes():
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        prompts = {f"r{n}": prompt(40 + 31 * (n % 13), n % 3) for n in range(60)}
        for name, tokens in prompts.items():
            client.send(name, tokens)
        for name, tokens in prompts.items():
            assert await client.answer(name) == expected(tokens, 8)
        assert decode.worker.stats().decode.num_remote_done > 10


async def test_hit_blocks_are_read_from_the_decode_worker():
    async with cluster() as shared:
        prefill, _, client = await shared.pair()
        base = prompt(60)
        client.send("local", base)
        await client.answer("local")
        client.send("remote", base + prompt(200, 5))
        assert await client.answer("remote") == expected(base + prompt(200, 5), 8)
        await shared.check_idle()
        peers = (await prefill.status())["transfer"]["peers"]
        assert {row["op"] for row in peers} == {"read", "write"}


@pytest.mark.parametrize(
    "forge",
    [lambda ids: ids[:-1], lambda ids: (*ids, 3), lambda ids: (-1, *ids[1:]), lambda ids: (10**6, *ids[1:])],
    ids=["few", "many", "negative", "beyond"],
)
async def test_a_grant_of_blocks_that_cannot_be_is_given_up(forge):
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        send = decode.server.send

        def forging(peer, message):
            if isinstance(message, HandoffGrant):
                message = msgspec.structs.replace(message, block_ids=forge(message.block_ids))
            return send(peer, message)

        decode.server.send = forging
        client.send("forged", prompt(300))
        assert await client.answer("forged") == expected(prompt(300), 8)
        assert prefill.worker.stats().prefill.num_failed == 1

        decode.server.send = send
        client.send("next", prompt(300, 5))
        assert await client.answer("next") == expected(prompt(300, 5), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)


async def test_done_never_arrives_after_a_write_of_the_same_hand_off_has_failed():
    """The later writes are submitted before the ledger hears of the failure, and their connection is made anew."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        poll = prefill.transport.poll

        def polling():
            completions, notifications = poll()
            if any(completion.error for completion in completions):
                until(lambda: prefill.worker.stats().transfer.num_unfinished == 3)
            return completions, notifications

        prefill.transport.poll = polling
        shared.fabric.faults.fail_next = 1
        client.send("r", prompt(600))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert decode.worker.stats().decode.num_recomputed == 1
        assert decode.worker.stats().decode.num_remote_done == 0


async def test_abort_at_every_stage_frees_everything():
    async with cluster() as shared:
        _, _, client = await shared.pair()
        for number in range(40):
            client.send(f"r{number}", prompt(500 + number, number), max_tokens=200)
            await asyncio.sleep(0.001 * (number % 8))
            client.abort(f"r{number}")
        client.send("after", prompt(400, 3))
        assert await client.answer("after") == expected(prompt(400, 3), 8)


async def test_a_cancelled_request_costs_the_prefill_worker_no_warning(monkeypatch, caplog):
    caplog.set_level(logging.INFO, OUTGOING_LOG)
    may_go_on = threading.Event()
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        execute = prefill.core.executor.execute
        monkeypatch.setattr(
            prefill.core.executor, "execute", lambda work: execute(work) if may_go_on.wait(PATIENCE_S) else None
        )
        client.send("cancelled", prompt(300))
        await shared.until(lambda: decode.ledger.num_grants == 1)
        client.abort("cancelled")
        await shared.until(lambda: not prefill.worker.inspect().queue.num_held)
        may_go_on.set()
    assert ends_logged(caplog) == [(logging.INFO, EndReason.ABANDONED)]


async def test_a_client_that_disconnects_cancels_its_requests():
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        for number in range(8):
            client.send(f"r{number}", prompt(300, number), max_tokens=3000)
        await client.until(lambda: len(client.tokens) > 2)
        await client.connection.close()
        await shared.until(lambda: decode.worker.inspect().num_requests == 0)


async def test_failed_and_lost_transfers_lead_to_local_prefill():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.fail_next = 1
        client.send("failed", prompt(300, 1))
        assert await client.answer("failed") == expected(prompt(300, 1), 8)
        shared.fabric.faults.drop_next = 1
        client.send("dropped", prompt(300, 2))
        await shared.until(lambda: shared.fabric.faults.drop_next == 0)
        shared.time_out_transfers()
        assert await client.answer("dropped") == expected(prompt(300, 2), 8)
        client.send("good", prompt(300, 3))
        assert await client.answer("good") == expected(prompt(300, 3), 8)
        assert decode.worker.stats().decode.num_remote_done == 1
        assert prefill.worker.stats().prefill.num_failed == 2


async def test_a_prefill_that_its_engine_cannot_continue_is_computed_by_its_owner(monkeypatch):
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        execute = prefill.core.executor.execute

        def failing(work: SchedulerOutput) -> ModelOutput:
            result = execute(work)
            result.failures[0] = "its grammar exploded"
            return result

        monkeypatch.setattr(prefill.core.executor, "execute", failing)
        client.send("a", prompt(300))
        assert await client.answer("a") == expected(prompt(300), 8)
        assert prefill.worker.stats().prefill.ends == {EndReason.ENGINE_REFUSED: 1}
        assert decode.worker.stats().decode.num_recomputed == 1
        await shared.check_idle()


async def test_late_and_reordered_writes():
    async with cluster() as shared:
        _, _, client = await shared.pair()
        shared.fabric.faults.delay_polls = 20
        shared.fabric.faults.reorder = True
        for number in range(10):
            client.send(f"r{number}", prompt(700, number))
        for number in range(0, 10, 2):
            client.abort(f"r{number}")
        for number in range(1, 10, 2):
            assert await client.answer(f"r{number}") == expected(prompt(700, number), 8)


async def test_a_killed_prefill_worker_costs_time_only():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        shared.fabric.faults.delay_polls = 200
        for number in range(6):
            client.send(f"r{number}", prompt(600, number))
        await shared.until(lambda: decode.ledger.num_grants > 0)
        await prefill.kill(shared)
        await shared.bury(prefill)
        for number in range(6):
            assert await client.answer(f"r{number}") == expected(prompt(600, number), 8)
        # Quarantined blocks come back only when the lease has ended.
        await shared.until(lambda: decode.core.metrics().num_blocks_in_use == 0)
        client.send("after", prompt(600, 99))
        assert await client.answer("after") == expected(prompt(600, 99), 8)


async def test_a_prefill_that_nobody_claims_is_taken_back():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        await prefill.worker.prefill.drain()
        client.send("r", prompt(300))
        await shared.until(lambda: decode.ledger.counters.num_opened == 1)
        shared.clock.skip(shared.disagg.remote_prefill_timeout_s)
        assert await client.answer("r") == expected(prompt(300), 8)


async def test_a_prefill_is_not_sent_away_when_the_last_prefill_worker_has_just_left(caplog, monkeypatch):
    """It left between the decision, on the engine's thread, and the push, on the loop's."""
    caplog.set_level(logging.INFO)
    async with cluster(remote_prefill_timeout_s=PATIENCE_S) as shared:
        prefill, decode, client = await shared.pair()
        await prefill.worker.prefill.drain()
        is_loop = threading.main_thread().ident
        seen = property(lambda _: int(threading.get_ident() != is_loop), lambda *_: None)
        monkeypatch.setattr(PeerTable, "num_prefill_workers", seen, raising=False)
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.places == {PrefillPlace.REMOTE: 1}
        assert EndReason.NO_PREFILL_WORKER.value in caplog.text


async def test_no_prefill_is_sent_away_while_the_only_prefill_worker_is_avoided():
    """For 30 s after a pause of it each was queued, pulled, begun there and refused, and then computed here."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        for _ in range(2):
            decode.ledger.conduct.failed(prefill.id, shared.clock.now(), decode.ledger.rules.avoid_s)
        loads = await client.loads(decode)
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        places = decode.worker.stats().decode.places
        assert places == {PrefillPlace.LOCAL_NO_PREFILL_WORKER: 1}
        await shared.until(lambda: any(sample.avoided == (prefill.id,) for sample in loads))
        shared.clock.skip(decode.ledger.rules.avoid_s)
        client.send("later", prompt(300, 1))
        assert await client.answer("later") == expected(prompt(300, 1), 8)
        assert places | {PrefillPlace.REMOTE: 1} == decode.worker.stats().decode.places


async def test_a_second_prefill_worker_joins_by_starting():
    async with cluster() as shared:
        first, decode, client = await shared.pair()
        second = await shared.join(WorkerRole.PREFILL)
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 2)
        for number in range(40):
            client.send(f"r{number}", prompt(200, number))
        for number in range(40):
            await client.answer(f"r{number}")

        # A prefill worker counts its last write maybe only after the answer.
        def counts():
            return [node.worker.stats().prefill.num_prefills for node in (first, second)]

        await shared.until(lambda: sum(counts()) == 40)
        assert min(counts()) > 0


async def test_a_drained_prefill_worker_leaves_no_trace():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        for number in range(10):
            client.send(f"r{number}", prompt(300, number))
        prefill.worker.request_drain()
        await prefill.running
        for number in range(10):
            assert await client.answer(f"r{number}") == expected(prompt(300, number), 8)
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 0)
        await prefill.control.close()
        shared.nodes.remove(prefill)


async def test_a_prefill_worker_does_not_leave_before_the_decode_worker_has_confirmed(monkeypatch):
    """Whoever hears that it has left, and not that the KV is there, computes it again."""
    may_hear, late = threading.Event(), []
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        poll = decode.transport.poll

        def poll_late():
            completions, notifications = poll()
            late.extend(notifications)
            heard = [late.pop(0) for _ in range(len(late) if may_hear.is_set() else 0)]
            return completions, heard

        monkeypatch.setattr(decode.transport, "poll", poll_late)
        client.send("r", prompt(300))
        await shared.until(lambda: late)
        prefill.worker.request_drain()
        await shared.until(lambda: prefill.id not in decode.worker.inspect().peers.prefill)
        assert not (await asyncio.wait([prefill.running], timeout=0.2))[0]
        may_hear.set()
        assert await client.answer("r") == expected(prompt(300), 8)
        assert await shared.gone(prefill) is None
        stats = decode.worker.stats().decode
        assert (stats.num_remote_done, stats.num_recomputed) == (1, 0)


class Held(MockExecutor):
    """It waits for ``go`` after 20 steps, so that its requests do not end before a test says so."""

    def __init__(self, config: EngineConfig, mock: MockConfig) -> None:
        super().__init__(config, mock, vocab_size=VOCAB_SIZE, max_model_len=4096)
        self.go = threading.Event()
        self._num_steps = 0

    def execute(self, work: SchedulerOutput) -> ModelOutput:
        self._num_steps += 1
        assert self._num_steps <= 20 or self.go.wait(PATIENCE_S)
        return super().execute(work)


async def test_a_draining_decode_worker_finishes_and_refuses():
    async with cluster() as shared:
        await shared.join(WorkerRole.PREFILL)
        decode = await shared.join(WorkerRole.DECODE, lambda config: Held(config, shared.mock))
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        client = await shared.client(decode)
        client.send("old", prompt(300), max_tokens=500)
        await client.until(lambda: "old" in client.tokens)
        decode.worker.request_drain()
        await shared.until(lambda: not decode.worker.inspect().is_accepting)
        client.send("new", prompt(10))
        await client.until(lambda: "new" in client.refused)
        assert client.refused["new"].retryable
        assert isinstance(decode.core.executor, Held)
        decode.core.executor.go.set()
        assert await client.answer("old") == expected(prompt(300), 500)
        await decode.running
        await decode.control.close()
        shared.nodes.remove(decode)


async def test_roles_change_without_a_restart():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        await prefill.worker.set_role(WorkerRole.DECODE)
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 0)
        other = await shared.client(prefill)
        other.send("here", prompt(300))
        assert await other.answer("here") == expected(prompt(300), 8)
        await prefill.worker.set_role(WorkerRole.PREFILL)
        await shared.until(lambda: len(decode.worker.inspect().peers.prefill) == 1)
        client.send("there", prompt(300, 9))
        assert await client.answer("there") == expected(prompt(300, 9), 8)
        assert decode.worker.stats().decode.num_remote_done == 1
        assert prefill.worker.epoch == 2


class Apart(MockExecutor):
    """Its KV is where no transport reaches it."""

    def __init__(self, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)
        self.kv_region = msgspec.structs.replace(self.kv_region, is_pool=False)


async def test_a_worker_whose_kv_no_hand_off_reaches_prefills_itself_and_keeps_its_role():
    """That of several ranks on CUDA, whoever is there to take it."""
    async with cluster() as shared:
        await shared.join(WorkerRole.PREFILL)
        alone = await shared.join(
            WorkerRole.BOTH, lambda config: Apart(config, shared.mock, vocab_size=VOCAB_SIZE, max_model_len=4096)
        )
        await shared.until(lambda: len(alone.worker.inspect().peers.prefill) == 1)
        client = await shared.client(alone)
        client.send("long", prompt(300))
        assert await client.answer("long") == expected(prompt(300), 8)
        assert alone.worker.stats().decode.num_remote_done == 0
        for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
            with pytest.raises(ConfigError, match=f"cannot be a {role} worker: its engine hands no KV over"):
                await alone.worker.set_role(role)
        assert alone.worker.role is WorkerRole.BOTH


async def test_a_hand_off_whose_notification_is_lost_is_done_a_moment_later():
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        decode.lose_notifications()
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.num_remote_done == 1
        await shared.until(lambda: not prefill.outgoing.handoffs)


async def test_blocks_return_when_a_notification_is_lost_with_the_connection():
    """The prefill worker has nothing more to claim, and the decode worker has no way to it: it connects again."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()

        def lose() -> None:
            asyncio.run_coroutine_threadsafe(break_connections(), loop)

        async def break_connections() -> None:
            (peer,) = decode.ledger.connections.values()
            decode.server.disconnect(peer)

        loop = asyncio.get_running_loop()
        decode.lose_notifications(lose)
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        await shared.until(lambda: decode.ledger.num_grants == 0)
        await shared.until(lambda: not prefill.outgoing.handoffs)


async def test_stale_and_forged_notifications_are_dropped():
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        decode.worker.decode.handoffs.notified(encode_message(HandoffDone(HandoffId("nobody", 1), 1, 5, None, 0, 0.0)))
        decode.worker.decode.handoffs.notified(b"garbage")
        decode.worker.decode.handoffs.notified(b"")
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.num_stale == 1


@pytest.mark.parametrize(
    ("tokens", "settings", "status"),
    [
        ((), {}, 400),
        ((5000,), {}, 400),
        ((2**32 - 1,) * 20, {}, 400),
        (prompt(5000), {}, 400),
        ((1,), {"stop_token_ids": (2000,)}, 400),
    ],
)
async def test_what_the_engine_refuses_reaches_the_client(tokens, settings, status):
    async with cluster() as shared:
        node = await shared.join(WorkerRole.BOTH)
        client = await shared.client(node)
        client.send("bad", tokens, **settings)
        await client.until(lambda: "bad" in client.refused)
        assert client.refused["bad"].status == status
        assert not client.refused["bad"].retryable
        client.send("good", prompt(20))
        assert await client.answer("good") == expected(prompt(20), 8)


GRAMMAR = Grammar(GrammarKind.REGEX, "a")


@pytest.fixture
def unbound(monkeypatch):
    """Engines obey no grammar: these tests are about when it is compiled."""
    monkeypatch.setattr(GrammarMasks, "enter", lambda *arguments: None)
    monkeypatch.setattr(MockExecutor, "prepare", lambda executor, sampling: None)


@pytest.mark.usefixtures("unbound")
async def test_a_grammar_is_compiled_beside_the_prefill_workers_loop_and_engine(monkeypatch):
    """While it is, the next prefill is computed and the loop answers."""
    may_go_on, threads = threading.Event(), []

    def slow(sampling):
        threads.append(threading.current_thread().name)
        assert may_go_on.wait(PATIENCE_S)

    async with cluster() as shared:
        prefill, _, client = await shared.pair()
        monkeypatch.setattr(prefill.core.executor, "prepare", slow)
        client.send("bound", prompt(300), grammar=GRAMMAR)
        await shared.until(lambda: threads)
        client.send("free", prompt(300, 5))
        assert await client.answer("free") == expected(prompt(300, 5), 8)
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == 1)
        may_go_on.set()
        assert await client.answer("bound") == expected(prompt(300), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 2)
        assert len(threads) == 1
        assert threads[0] not in ("engine", "MainThread")


@pytest.mark.usefixtures("unbound")
@pytest.mark.parametrize("error", [InvalidInputError("no"), OSError("no memory")])
async def test_a_prefill_whose_grammar_does_not_compile_is_computed_by_its_owner(monkeypatch, error):
    def refuse(sampling):
        raise error

    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        monkeypatch.setattr(prefill.core.executor, "prepare", refuse)
        client.send("bound", prompt(300), grammar=GRAMMAR)
        assert await client.answer("bound") == expected(prompt(300), 8)
        assert prefill.worker.stats().prefill.num_prefills == 0
        assert decode.worker.stats().decode.num_remote_done == 0


@pytest.mark.usefixtures("unbound")
@pytest.mark.parametrize("ending", ["drained", "aborted", "lease lost"])
async def test_what_may_happen_while_a_grammar_is_compiled(monkeypatch, caplog, ending):
    caplog.set_level(logging.INFO, OUTGOING_LOG)
    may_go_on = threading.Event()
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        monkeypatch.setattr(prefill.core.executor, "prepare", lambda sampling: may_go_on.wait(PATIENCE_S))
        client.send("bound", prompt(300), grammar=GRAMMAR)
        side = prefill.worker.prefill
        await shared.until(lambda: side.num_handoffs == 1)
        if ending == "drained":
            draining = asyncio.get_running_loop().create_task(side.drain())
            may_go_on.set()
            await draining
        elif ending == "aborted":
            client.abort("bound")
            await shared.until(lambda: not decode.ledger.handoffs)
            may_go_on.set()
            await shared.until(lambda: side.num_handoffs == 0)
        else:
            await expire_lease(prefill)
            await shared.until(lambda: prefill.worker.inspect().lease.term == 1)
            may_go_on.set()
        if ending != "aborted":
            assert await client.answer("bound") == expected(prompt(300), 8)
        await shared.until(lambda: side.num_handoffs == 0)
        assert prefill.worker.stats().prefill.num_prefills == (ending == "drained")
    ended = {"aborted": [(logging.INFO, EndReason.REFUSED)], "lease lost": [(logging.WARNING, EndReason.LEASE_LOST)]}
    assert ends_logged(caplog) == ended.get(ending, [])


async def test_rows_sit_out_steps_on_both_sides(monkeypatch):
    sat_out = sit_out(monkeypatch, 1)
    async with cluster() as shared:
        _, decode, client = await shared.pair()
        prompts = {f"r{n}": prompt(60 + 31 * (n % 13), n % 3) for n in range(20)}
        for name, tokens in prompts.items():
            client.send(name, tokens)
        for name, tokens in prompts.items():
            assert await client.answer(name) == expected(tokens, 8)
        assert decode.worker.stats().decode.num_remote_done > 5
        assert set(sat_out) == {"chunk", "decode"}
