"""Who gets in at a worker's request plane, and what each caller may say there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.contracts.waiting import eventually
from tests.patience import PATIENCE_S
from tests.worker.cluster import FRONTEND_KEY, WAIT_S, Cluster, Node, cluster, expected, prompt

from kvrelay.config import WorkerRole
from kvrelay.control.base import Discovery, Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.handoff import HandoffId
from kvrelay.core.messages import (
    AbortRequest,
    AdminReply,
    AdminRequest,
    GenerateRequest,
    OutputBatch,
    Ping,
    Pong,
    RequestRefused,
)
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.token_ids import to_bytes
from kvrelay.core.workers import CallerInfo, KvMetadata
from kvrelay.errors import WorkerUnavailableError
from kvrelay.handoff.messages import (
    HandoffAbandon,
    HandoffClaim,
    HandoffDone,
    HandoffGrant,
    HandoffProgress,
    HandoffReady,
    HandoffReleased,
)
from kvrelay.rpc.wire import Message, encode_message
from kvrelay.worker import worker as worker_module
from kvrelay.worker.cluster import callers as callers_module
from kvrelay.worker.cluster.callers import MAY_SAY, Caller, CallerKind, Callers

KEYS = Keys("default")
GENERATE = GenerateRequest("r", "w", to_bytes((1, 2, 3)), SamplingParams())
HANDOFF = HandoffId("d", 1)
MESSAGES: list[Message] = [
    GENERATE,
    AbortRequest("r"),
    Ping(1),
    AdminRequest(1, "drain"),
    HandoffClaim(HANDOFF, "p", "same"),
    HandoffReleased(HANDOFF, "p"),
    HandoffProgress(HANDOFF, 1),
    HandoffDone(HANDOFF, 1, 7, None, 0, 0.0),
    HandoffReady(HANDOFF, 1, (1,), 7, None, 0.0),
    HandoffAbandon(HANDOFF, 1),
    HandoffGrant(HANDOFF, 1, (1,), 0),
    OutputBatch(()),
    RequestRefused("r", "no", 503, retryable=True),
    Pong(1, "w"),
    AdminReply(1),
]


@asynccontextmanager
async def watching(*, is_open: bool = False) -> AsyncIterator[tuple[Callers, Discovery]]:
    control = MemoryBroker().plane()
    callers = Callers(control.discovery, KEYS, is_open=is_open)
    callers.start()
    try:
        yield callers, control.discovery
    finally:
        await callers.close()
        await control.close()


async def put(discovery: Discovery, key: str, value: bytes) -> None:
    await discovery.put(key, value, await discovery.grant(60.0))


def entry(caller_id: str, public_key: str) -> bytes:
    return msgspec.json.encode(CallerInfo(caller_id, public_key))


def identity(kind: CallerKind, caller_id: str) -> str:
    return msgspec.json.encode(Caller(kind, caller_id)).decode()


async def test_an_identity_is_what_discovery_says_of_the_key() -> None:
    async with watching() as (callers, discovery):
        await put(discovery, KEYS.frontend("f"), entry("f", "kf"))
        await put(discovery, KEYS.operator("o"), entry("o", "ko"))
        callers.learn(Caller(CallerKind.WORKER, "w"), "kw")
        assert await callers.admit("kf") == identity(CallerKind.FRONTEND, "f")
        assert await callers.admit("ko") == identity(CallerKind.OPERATOR, "o")
        assert await callers.admit("kw") == identity(CallerKind.WORKER, "w")


async def test_a_key_that_is_not_there_yet_is_waited_for() -> None:
    async with watching() as (callers, discovery):
        asked = asyncio.create_task(callers.admit("k"))
        await asyncio.sleep(0)
        await put(discovery, KEYS.frontend("other"), entry("other", "another key"))
        await put(discovery, KEYS.frontend("f"), entry("f", "k"))
        assert await asked == identity(CallerKind.FRONTEND, "f")


@pytest.mark.parametrize("key", ["", "k", "an older key"])
async def test_who_is_not_in_discovery_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching() as (callers, discovery):
        for value in ("an older key", "k", ""):
            await put(discovery, KEYS.frontend("f"), entry("f", value))
        await put(discovery, KEYS.frontend("last"), entry("last", "last"))
        assert await callers.admit("last") is not None
        monkeypatch.setattr(callers_module, "ADMISSION_WAIT_S", 0.02)
        assert await callers.admit(key) is None


async def test_an_ended_lease_takes_the_key_along(monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching() as (callers, discovery):
        lease = await discovery.grant(5.0)
        await discovery.put(KEYS.operator("o"), entry("o", "k"), lease)
        assert await callers.admit("k") is not None
        monkeypatch.setattr(callers_module, "ADMISSION_WAIT_S", 0.02)
        await lease.revoke()
        await eventually(lambda: "0 known" in repr(callers))
        assert await callers.admit("k") is None


async def test_a_key_stays_with_who_registered_it_first() -> None:
    async with watching() as (callers, discovery):
        callers.learn(Caller(CallerKind.WORKER, "w"), "k")
        await put(discovery, KEYS.operator("rogue"), entry("rogue", "k"))
        await eventually(lambda: "2 known" in repr(callers))
        assert await callers.admit("k") == identity(CallerKind.WORKER, "w")
        callers.forget(Caller(CallerKind.WORKER, "w"))
        assert await callers.admit("k") == identity(CallerKind.OPERATOR, "rogue")


@pytest.mark.parametrize(
    "value", [b"", b"{", b"[" * 100_000, b'{"caller_id": 1}', entry("somebody else", "k"), b'"\xff"']
)
async def test_malformed_entries_are_passed_over(value: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with watching() as (callers, discovery):
        await put(discovery, KEYS.frontend("bad"), value)
        await put(discovery, KEYS.frontend("good"), entry("good", "good"))
        assert await callers.admit("good") is not None
        monkeypatch.setattr(callers_module, "ADMISSION_WAIT_S", 0.02)
        assert await callers.admit("k") is None


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
@pytest.mark.parametrize("kind", CallerKind)
async def test_each_kind_of_caller_says_what_it_is_there_for(kind: CallerKind, message: Message) -> None:
    async with watching() as (callers, _):
        refusal = callers.refusal(identity(kind, "p"), message)
        assert (refusal is None) is isinstance(message, MAY_SAY[kind])
        assert callers.refusal("", message) == "its sender is not known"


async def test_an_open_request_plane_asks_nobody() -> None:
    async with watching(is_open=True) as (callers, _):
        assert all(callers.refusal("", message) is None for message in MESSAGES)


@pytest.mark.parametrize("message", [HandoffClaim(HANDOFF, "p", "same"), HandoffReleased(HANDOFF, "p")])
async def test_a_worker_speaks_for_itself_only(message: Message) -> None:
    async with watching() as (callers, _):
        assert callers.refusal(identity(CallerKind.WORKER, "q"), message) == "q speaks in the name of p"


# -- with workers -----------------------------------------------------------------------------------------------------


class Rogue:
    """Has the control plane's credentials, a key of its own, and bad intentions."""

    def __init__(self, shared: Cluster, node: Node, worker_id: str = "rogue") -> None:
        self.worker_id = worker_id
        self.grants: list[HandoffGrant] = []
        self.heard: list[Message] = []
        self._shared = shared
        self._node = node

    async def register(self, node: Node) -> None:
        """As a prefill worker under a lease that it keeps alive: a second after its end it writes nothing more."""
        self.control = node.control
        self.lease = await self.control.discovery.grant(PATIENCE_S)
        compatibility = self._node.worker.inspect().kv_compatibility
        metadata = KvMetadata(
            self.worker_id, 0, "loopback", b"", 0, 0, 1, "cpu", 0, compatibility, "key of the rogue", 1.0
        )
        key = KEYS.worker_kv_metadata(self.worker_id, 0)
        await self.control.discovery.put(key, msgspec.json.encode(metadata), self.lease)

    async def connect(self, key: str = "key of the rogue") -> None:
        self.client = self._shared.network.client(self._node.server.address, key)
        self.client.on_message(self._receive)
        await self.client.start()

    def _receive(self, message: Message) -> None:
        self.heard.append(message)
        if isinstance(message, HandoffGrant):
            self.grants.append(message)

    def claim(self, handoff_id: HandoffId, name: str | None = None) -> None:
        compatibility = self._node.worker.inspect().kv_compatibility
        self.client.send(HandoffClaim(handoff_id, name or self.worker_id, compatibility))


async def test_who_is_not_in_discovery_does_not_even_get_a_pong(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as shared:
        decode = await shared.join(WorkerRole.BOTH)
        rogue = Rogue(shared, decode)
        with monkeypatch.context() as patience:
            patience.setattr(callers_module, "ADMISSION_WAIT_S", 0.05)
            for key in ("", "key of the rogue", decode.worker.identity.public_key + "?"):
                with pytest.raises(WorkerUnavailableError):
                    await rogue.connect(key)
        client = await shared.client(decode)
        client.send("r", prompt(20))
        assert await client.answer("r") == expected(prompt(20), 8)


async def test_a_frontend_sends_no_admin_commands_and_claims_nothing() -> None:
    async with cluster() as shared:
        decode = await shared.join(WorkerRole.BOTH)
        await shared.register_frontend()
        rogue = Rogue(shared, decode)
        await rogue.connect(FRONTEND_KEY)
        rogue.client.send(AdminRequest(1, "drain"))
        rogue.claim(HANDOFF, decode.id)
        rogue.client.send(Ping(1))
        await shared.until(lambda: bool(rogue.heard))
        (pong,) = rogue.heard
        assert isinstance(pong, Pong)
        assert (pong.nonce, pong.worker_id) == (1, decode.id)
        assert pong.publish_secret
        assert decode.worker.is_ready


async def test_a_worker_takes_no_hand_off_in_anothers_name() -> None:
    """Neither a claim nor a release; the hand-off goes its way."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        rogue = Rogue(shared, decode)
        await rogue.register(prefill)
        await rogue.connect()
        prefill.slow_down(0.05)
        client.send("r", prompt(1500))
        await shared.until(lambda: decode.worker.inspect().num_grants == 1)
        (handoff_id,) = decode.ledger.handoffs
        rogue.claim(handoff_id, prefill.id)
        for message in (HandoffReleased(handoff_id, prefill.id), HandoffReleased(handoff_id, rogue.worker_id), Ping(1)):
            rogue.client.send(message)
        await shared.until(lambda: bool(rogue.heard))
        assert rogue.heard == [Pong(1, decode.id)]
        assert (decode.ledger.num_grants, decode.worker.inspect().num_grants) == (1, 1)
        assert await client.answer("r") == expected(prompt(1500), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)
        await rogue.lease.revoke()


async def test_blocks_return_from_a_claimant_that_is_gone() -> None:
    """It claims what waits for others, computes nothing, and goes without a word."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        rogue = Rogue(shared, decode)
        await rogue.register(decode)
        await rogue.connect()
        hold_claims(prefill)
        for number in range(6):
            client.send(f"r{number}", prompt(600, number))
        ledger = decode.ledger
        await shared.until(lambda: ledger.counters.num_opened == 6)
        for handoff_id in list(ledger.handoffs):
            rogue.claim(handoff_id)
        await shared.until(lambda: len(rogue.grants) == 6)
        await rogue.lease.revoke()
        await rogue.client.close()
        for number in range(6):
            assert await client.answer(f"r{number}") == expected(prompt(600, number), 8)
        await shared.until(lambda: ledger.num_grants == 0)
        assert decode.worker.inspect().num_grants == 0


async def test_a_claimant_that_lives_and_says_nothing_does_not_keep_a_request() -> None:
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        hold_claims(prefill)
        ledger = decode.ledger
        ledger.rules = msgspec.structs.replace(ledger.rules, silence_timeout_s=0.1)
        rogue = Rogue(shared, decode)
        await rogue.register(prefill)
        await rogue.connect()
        client.send("r", prompt(600))
        await shared.until(lambda: ledger.counters.num_opened == 1)
        rogue.claim(next(iter(ledger.handoffs)))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert (len(rogue.grants), ledger.counters.num_expired) == (1, 1)
        await rogue.lease.revoke()


async def test_nobody_but_the_claimant_says_that_a_hand_off_is_done() -> None:
    """Neither over the request plane nor by a notification; both know its id and generation."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        rogue = Rogue(shared, decode)
        await rogue.register(prefill)
        await rogue.connect()
        prefill.slow_down(0.05)
        client.send("r", prompt(1500))
        await shared.until(lambda: decode.worker.inspect().num_grants == 1)
        (handoff_id,) = decode.ledger.handoffs
        forged = HandoffDone(handoff_id, 1, 7, None, 0, 0.0)
        decode.worker.decode.handoffs.notified(encode_message(forged))
        for message in (forged, HandoffProgress(handoff_id, 1), Ping(1)):
            rogue.client.send(message)
        await shared.until(lambda: bool(rogue.heard))
        assert decode.ledger.counters.num_stale == 3
        assert await client.answer("r") == expected(prompt(1500), 8)
        assert decode.worker.stats().decode.num_remote_done == 1
        await rogue.lease.revoke()


def hold_claims(node: Node) -> None:
    """The worker pulls no prefills."""
    node.worker.prefill.stop()


async def test_a_claimant_that_never_registered_gets_nothing() -> None:
    """Not even if it were let in: its end would never be heard of."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        hold_claims(prefill)
        rogue = Rogue(shared, decode)

        async def admit(public_key: str) -> str:
            return identity(CallerKind.WORKER, rogue.worker_id)

        decode.server.admit_by(admit)
        await rogue.connect()
        client.send("r", prompt(600))
        ledger = decode.ledger
        await shared.until(lambda: ledger.counters.num_opened == 1)
        rogue.claim(next(iter(ledger.handoffs)))
        assert await client.answer("r") == expected(prompt(600), 8)
        assert rogue.grants == []
        assert ledger.counters.num_granted == 0


async def test_a_change_of_role_gives_up_on_a_claimant_that_lives_and_says_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its blocks stay quarantined, since it may write, until its lease ends."""
    monkeypatch.setattr(worker_module, "GIVE_UP_LEASES", 0.001)
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        hold_claims(prefill)
        rogue = Rogue(shared, decode)
        await rogue.register(prefill)
        await rogue.connect()
        client.send("r", prompt(600))
        ledger = decode.ledger
        await shared.until(lambda: ledger.counters.num_opened == 1)
        rogue.claim(next(iter(ledger.handoffs)))
        await shared.until(lambda: len(rogue.grants) == 1)
        client.abort("r")
        await shared.until(lambda: any(isinstance(message, HandoffAbandon) for message in rogue.heard))
        async with asyncio.timeout(WAIT_S):
            await decode.worker.set_role(WorkerRole.PREFILL)
        assert f"{rogue.grants[0].handoff_id} (rogue)" in caplog.text
        assert (ledger.num_grants, decode.core.pool.num_quarantined) == (1, len(rogue.grants[0].block_ids))
        await rogue.lease.revoke()
        await shared.until(lambda: decode.core.pool.num_quarantined == 0)
        assert ledger.num_grants == 0


async def test_a_decode_worker_takes_back_its_own_hand_offs_only() -> None:
    """The ids of hand-offs are easily guessed."""
    async with cluster() as shared:
        prefill, decode, client = await shared.pair()
        rogue = await shared.join(WorkerRole.DECODE)
        await shared.until(lambda: len(rogue.worker.inspect().peers.prefill) == 1)
        to_rogue = await shared.client(rogue)
        to_rogue.send("before", prompt(600, 5))
        assert await to_rogue.answer("before") == expected(prompt(600, 5), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 1)
        prefill.slow_down(0.05)
        client.send("r", prompt(1500))
        await shared.until(lambda: prefill.worker.inspect().queue.num_held == decode.ledger.num_grants == 1)
        (handoff_id,) = decode.ledger.handoffs
        (peer,) = [peer for peer in rogue.server.peers if prefill.id in rogue.server.identity(peer)]
        assert rogue.server.send(peer, HandoffAbandon(handoff_id, 1))
        assert await client.answer("r") == expected(prompt(1500), 8)
        await shared.until(lambda: prefill.worker.stats().prefill.num_prefills == 2)
        assert prefill.worker.stats().prefill.num_abandoned == 0
