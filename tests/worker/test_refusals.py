"""Each refusal of a request has a reason, and each reason a counter."""

from __future__ import annotations

import pytest
from tests.worker.cluster import VOCAB_SIZE, cluster, prompt

from kvrelay.config import WorkerRole
from kvrelay.core.messages import GenerateRequest, RequestRefused
from kvrelay.core.sampling import SamplingParams
from kvrelay.core.status import RefusalKind
from kvrelay.core.token_ids import to_bytes
from kvrelay.errors import (
    EngineDeadError,
    InvalidInputError,
    KvDemandError,
    KvrelayError,
    ObjectiveMissedError,
    OverloadedError,
    PromptTooLongError,
    WorkerUnavailableError,
)
from kvrelay.rpc.base import Peer
from kvrelay.rpc.wire import Message
from kvrelay.worker.decode.refusals import Refusals, refusal_of

PEER = Peer(b"f")


@pytest.mark.parametrize(
    ("error", "kind", "status", "retryable"),
    [
        (InvalidInputError("no"), RefusalKind.INVALID, 400, False),
        (PromptTooLongError("no"), RefusalKind.INVALID, 400, False),
        (OverloadedError("no"), RefusalKind.QUEUE_FULL, 429, True),
        (KvDemandError("no"), RefusalKind.KV_FULL, 429, True),
        (ObjectiveMissedError("no"), RefusalKind.OBJECTIVE, 429, True),
        (WorkerUnavailableError("no"), RefusalKind.UNAVAILABLE, 503, True),
        (EngineDeadError("no"), RefusalKind.UNAVAILABLE, 500, True),
        (KvrelayError("no"), RefusalKind.FAILED, 500, False),
    ],
)
def test_an_error_becomes_a_refusal_with_its_reason(
    error: KvrelayError, kind: RefusalKind, status: int, retryable: bool
) -> None:
    assert refusal_of("r", error) == RequestRefused("r", "no", status, retryable, 1.0, kind)


def test_the_wait_is_the_errors_unless_the_caller_knows_better() -> None:
    assert refusal_of("r", OverloadedError("no", retry_after_s=7.0)).retry_after_s == 7.0
    assert refusal_of("r", OverloadedError("no", retry_after_s=7.0), retry_after_s=9.0).retry_after_s == 9.0


def test_every_reason_has_a_counter_from_the_start() -> None:
    sent: list[Message] = []

    class Server:
        def send(self, peer: Peer, message: Message) -> bool:
            sent.append(message)
            return True

    refusals = Refusals(Server())  # type: ignore[arg-type]
    assert refusals.counts == dict.fromkeys(RefusalKind, 0)
    refusal = refusal_of("r", WorkerUnavailableError("leaving"), kind=RefusalKind.DRAINING)
    refusals.send(PEER, refusal)
    assert (sent, refusals.counts[RefusalKind.DRAINING], sum(refusals.counts.values())) == ([refusal], 1, 1)


async def test_a_worker_tells_and_counts_why_it_refuses():
    async with cluster() as shared:
        node = await shared.join(WorkerRole.BOTH, num_blocks=64, max_num_waiting=4)
        client = await shared.client(node)
        client.connection.send(
            GenerateRequest("gone", "worker-of-before", to_bytes(prompt(8)), SamplingParams(max_tokens=1))
        )
        client.send("invalid", (VOCAB_SIZE,))
        await client.until(lambda: len(client.refused) == 2)
        node.worker.decode.accepting = False
        client.send("draining", prompt(8))
        await client.until(lambda: len(client.refused) == 3)
        node.worker.decode.accepting = True
        kinds = {name: refusal.kind for name, refusal in client.refused.items()}
        assert kinds == {"gone": RefusalKind.GONE, "invalid": RefusalKind.INVALID, "draining": RefusalKind.DRAINING}
        counts = (await node.status())["refusals"]
        assert {kind: count for kind, count in counts.items() if count} == {"gone": 1, "invalid": 1, "draining": 1}
