"""Prefills that stop short of the prompt's end (``KVLayout.tail_tokens``): the decode worker computes the tail, and
samples the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count

import msgspec
import pytest
from tests.contracts.waiting import holds
from tests.worker.cluster import LOOPBACK, Node, cluster, expected, prompt
from tests.worker.test_prefill_first import PairedClient

from kvrelay import LLM, SamplingParams
from kvrelay.config import EngineConfig, MockConfig, RunnerConfig, TransferConfig, WorkerRole
from kvrelay.core.handoff import HandoffOrder
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engine.step import Executor
from kvrelay.executors.torch import build_executor
from kvrelay.handoff.messages import HandoffGrant

pytestmark = pytest.mark.slow

BLOCK = 16
TAILS = [1, BLOCK + 3, 200]
LENGTHS = [1, 2, BLOCK, BLOCK + 1, BLOCK + 4, 64, 199, 200, 201, 217, 300, 1000]
TRANSPORTS = {
    "loopback": replace(LOOPBACK, transfer_timeout_s=60.0),
    "checksums": replace(LOOPBACK, transfer_timeout_s=60.0, kv_checksums=True),
    "pull": replace(LOOPBACK, transfer_timeout_s=60.0, send_type="GET"),
    "shm": TransferConfig(transport="shm", transfer_timeout_s=60.0),
    "nixl": TransferConfig(transport="nixl", transfer_timeout_s=60.0),
    "p2p": TransferConfig(transport="p2p", transfer_timeout_s=60.0, p2p_room_wait_s=30.0),
    "p2p, pull": TransferConfig(transport="p2p", send_type="GET", transfer_timeout_s=60.0, p2p_room_wait_s=30.0),
}


@asynccontextmanager
async def paired(
    tail_tokens: int, transfer: TransferConfig = LOOPBACK, sizes: tuple[int, int] = (BLOCK, BLOCK), **settings: float
) -> AsyncIterator[PairedClient]:
    """Of the decode-first prompts none is computed at the decode worker for its length."""
    settings = {"max_local_prefill_length": 0, **settings}
    async with cluster(transfer=transfer, tail_tokens=tail_tokens, **settings) as shared:
        prefill = await shared.join(WorkerRole.PREFILL, block_size=sizes[0])
        decode = await shared.join(WorkerRole.DECODE, block_size=sizes[1])
        await shared.acquainted(prefill, decode)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        yield PairedClient(shared, prefill, decode, await shared.client(prefill), await shared.client(decode))


async def ask(pair: PairedClient, order: HandoffOrder, tokens: tuple[int, ...], **settings: object) -> list[int]:
    if order is HandoffOrder.PREFILL_FIRST:
        return await pair.answer(pair.send(tokens, **settings))
    request_id = f"r{len(pair.to_decode.last)}"
    pair.to_decode.send(request_id, tokens, **settings)
    return await pair.to_decode.answer(request_id)


def num_computed(node: Node) -> int:
    return node.core.scheduler.num_prefilled_tokens


@pytest.mark.parametrize("order", HandoffOrder)
@pytest.mark.parametrize("tail_tokens", TAILS)
async def test_each_worker_computes_its_part(tail_tokens: int, order: HandoffOrder) -> None:
    """Prompts that are all tail are the decode worker's alone."""
    async with paired(tail_tokens) as pair:
        for number, length in enumerate(LENGTHS):
            tokens = prompt(length, 100 * number)
            assert await ask(pair, order, tokens) == expected(tokens, 8)
        remote = [length for length in LENGTHS if length > tail_tokens]
        assert pair.num_remote == len(remote)
        assert num_computed(pair.prefill) == sum(remote) - tail_tokens * len(remote)
        assert num_computed(pair.decode) == sum(LENGTHS) - num_computed(pair.prefill)
        assert pair.prefill.core.scheduler.num_generated_tokens == 0
        assert pair.to_prefill.tokens == {}
        assert pair.prefill.worker.inspect().num_paired == 0


@pytest.mark.parametrize("order", HandoffOrder)
@pytest.mark.parametrize("transport", [name for name in TRANSPORTS if name != "loopback"])
async def test_by_every_transport(transport: str, order: HandoffOrder) -> None:
    async with paired(BLOCK + 3, TRANSPORTS[transport]) as pair:
        for number, length in enumerate([1, BLOCK + 3, BLOCK + 4, 300, 701]):
            tokens = prompt(length, number)
            assert await ask(pair, order, tokens) == expected(tokens, 8)
        assert pair.num_remote == 3
        assert pair.decode.worker.stats().decode.num_recomputed == 0


@pytest.mark.parametrize("order", HandoffOrder)
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (48, 16)])
async def test_hit_blocks_and_blocks_of_two_sizes(sizes: tuple[int, int], order: HandoffOrder) -> None:
    """The last prompt's hits leave nothing to a prefill worker."""
    async with paired(BLOCK + 3, TRANSPORTS["checksums"], sizes) as pair:
        base = prompt(192)
        others = [base + prompt(length, 5) for length in (60, BLOCK + 3, BLOCK + 4, 700)]
        for tokens in (base, *others):
            assert await ask(pair, order, tokens) == expected(tokens, 8)
        last = others[-1][: 192 + 32 + 10]
        before = pair.num_remote
        assert await ask(pair, order, last) == expected(last, 8)
        assert pair.num_remote == before
        assert pair.decode.worker.stats().decode.num_kv_checksum_mismatches == 0


@pytest.mark.parametrize("order", HandoffOrder)
async def test_many_at_once_with_shared_prefixes(order: HandoffOrder) -> None:
    async with paired(3) as pair:
        numbers = count()

        async def attempt() -> bool:
            first = 60 * next(numbers)
            prompts = {n: prompt(40 + 31 * (n % 13), first + n % 3) for n in range(first, first + 60)}
            answers = await asyncio.gather(*(_ask_named(pair, order, n, tokens) for n, tokens in prompts.items()))
            assert answers == [expected(tokens, 8) for tokens in prompts.values()]
            return pair.num_remote > 10

        await holds(attempt)  # decode computes all of it while NATS does not answer


async def _ask_named(pair: PairedClient, order: HandoffOrder, number: int, tokens: tuple[int, ...]) -> list[int]:
    if order is HandoffOrder.PREFILL_FIRST:
        return await pair.answer(pair.send(tokens))
    pair.to_decode.send(f"n{number}", tokens)
    return await pair.to_decode.answer(f"n{number}")


@pytest.mark.parametrize("order", HandoffOrder)
@pytest.mark.parametrize("tail_tokens", [1, BLOCK + 3])
async def test_a_decode_worker_without_room_holds_the_kv(tail_tokens: int, order: HandoffOrder) -> None:
    async with paired(tail_tokens) as pair:
        await pair.decode.engine.call(lambda core: core.pool.allocate(core.pool.num_blocks))
        prompts = [prompt(length, length) for length in (1, tail_tokens + BLOCK, tail_tokens + BLOCK + 1, 300)]
        asking = [asyncio.create_task(_ask_named(pair, order, number, tokens)) for number, tokens in enumerate(prompts)]
        await pair.shared.until(lambda: pair.num_remote == 3)
        assert pair.to_decode.tokens == {}
        assert pair.decode.core.holding.num_held == 3
        await pair.decode.engine.call(lambda core: core.pool.release(range(core.pool.num_blocks)))
        assert await asyncio.gather(*asking) == [expected(tokens, 8) for tokens in prompts]
        assert num_computed(pair.decode) == 1 + 3 * tail_tokens
        # What came from elsewhere is no hit of this worker's cache.
        assert set(pair.to_decode.cached.values()) == {0}


async def test_a_continued_request_has_its_tail_in_the_answer_so_far() -> None:
    async with paired(3) as pair:
        known = tuple(expected(prompt(300), 5))
        halves = [msgspec.structs.replace(half, output_token_ids=known) for half in pair.halves(prompt(300))]
        for client, half in zip((pair.to_prefill, pair.to_decode), halves, strict=True):
            client.connection.send(half)
        assert await pair.answer(halves[0].request_id) == expected(prompt(300), 8)[5:]
        pair.to_decode.send_message("again", prompt(200), output_token_ids=tuple(expected(prompt(200), 2)))
        assert await pair.answer("again") == expected(prompt(200), 8)[2:]
        assert pair.num_remote == 2


async def test_an_answer_of_one_token() -> None:
    async with paired(1) as pair:
        for order in HandoffOrder:
            tokens = prompt(300, len(order))
            assert await ask(pair, order, tokens, max_tokens=1) == expected(tokens, 1)
        assert pair.num_remote == 2


def torch(tail_tokens: int) -> Callable[[EngineConfig], Executor]:
    """The tiny model, as if it had a drafter that reads ahead."""

    def build(config: EngineConfig) -> Executor:
        runner = RunnerConfig(dtype="float32", device="cpu", num_threads=1)
        executor = build_executor(bundled_checkpoint_path(), runner, config)
        (cut,) = executor.kv_layout.regions
        region = msgspec.structs.replace(cut.region, tail_tokens=tail_tokens)
        cuts = (msgspec.structs.replace(cut, region=region),)
        executor.kv_layout = msgspec.structs.replace(executor.kv_layout, regions=cuts)  # type: ignore[misc]
        return executor

    return build


@pytest.mark.parametrize(("transport", "tail_tokens"), [("nixl", 1), ("p2p, pull", BLOCK + 3), ("checksums", 50)])
async def test_with_a_model(transport: str, tail_tokens: int) -> None:
    prompts = [
        tuple(16 + (7 * number + number * number) % 400 for number in range(start, start + length))
        for start, length in enumerate((1, 50, 51, 100, 200))
    ]
    with LLM(dtype="float32", device="cpu", num_blocks=64, num_threads=1) as llm:
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        answers = [list(output.token_ids) for output in llm.generate([list(tokens) for tokens in prompts], sampling)]
    async with cluster(transfer=TRANSPORTS[transport], max_local_prefill_length=0) as shared:
        prefill = await shared.join(WorkerRole.PREFILL, torch(tail_tokens))
        decode = await shared.join(WorkerRole.DECODE, torch(tail_tokens))
        await shared.acquainted(prefill, decode)
        await shared.until(lambda: decode.id in prefill.worker.inspect().peers.addresses)
        pair = PairedClient(shared, prefill, decode, await shared.client(prefill), await shared.client(decode))
        for order in HandoffOrder:
            found = [await ask(pair, order, tokens, ignore_eos=True) for tokens in prompts]
            assert found == answers
            await decode.engine.call(lambda core: core.clear_cache())
        assert pair.num_remote == 2 * sum(len(tokens) > tail_tokens for tokens in prompts)
        assert prefill.core.scheduler.num_generated_tokens == 0


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", HandoffOrder)
async def test_a_prefill_worker_that_dies_costs_no_answer(order: HandoffOrder) -> None:
    async with paired(BLOCK + 3) as pair:
        pair.prefill.slow_down(0.05)
        tokens = prompt(2000)
        asking = asyncio.create_task(_ask_named(pair, order, 0, tokens))
        await pair.shared.until(lambda: pair.decode.ledger.num_grants == 1)
        await pair.prefill.kill(pair.shared)
        await pair.shared.bury(pair.prefill)
        assert await asking == expected(tokens, 8)
        assert pair.num_remote == 0


@pytest.mark.parametrize("order", HandoffOrder)
async def test_a_decode_worker_that_dies_leaves_nothing_behind(order: HandoffOrder) -> None:
    async with paired(BLOCK + 3) as pair:
        pair.prefill.slow_down(0.02)
        asking = asyncio.create_task(_ask_named(pair, order, 0, prompt(2000)))
        await pair.shared.until(lambda: pair.decode.ledger.num_grants == 1)
        await pair.decode.kill(pair.shared)
        await pair.shared.bury(pair.decode)
        asking.cancel()
        await pair.shared.until(lambda: not pair.prefill.core.has_unfinished())


async def test_aborts_at_every_stage_free_everything() -> None:
    async with paired(5) as pair:
        for number in range(40):
            request_id = pair.send(prompt(500 + number, number), max_tokens=200)
            await asyncio.sleep(0.001 * (number % 8))
            pair.abort(request_id)
        assert await ask(pair, HandoffOrder.PREFILL_FIRST, prompt(400, 3)) == expected(prompt(400, 3), 8)


async def test_notifications_that_are_lost_are_repeated() -> None:
    async with paired(5) as pair:
        pair.decode.lose_notifications()
        for order in HandoffOrder:
            tokens = prompt(300, len(order))
            assert await ask(pair, order, tokens) == expected(tokens, 8)
        assert pair.num_remote == 2


@pytest.mark.parametrize("tails", [(0, 1), (1, 0), (1, 2)])
async def test_workers_that_stop_elsewhere_are_no_pair(
    tails: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(max_local_prefill_length=0) as shared:
        nodes = []
        for role, tail_tokens in zip((WorkerRole.PREFILL, WorkerRole.DECODE), tails, strict=True):
            shared.mock = MockConfig(speedup_ratio=0, tail_tokens=tail_tokens)
            nodes.append(await shared.join(role))
        prefill, decode = nodes
        client = await shared.client(decode)
        client.send("r", prompt(300))
        assert await client.answer("r") == expected(prompt(300), 8)
        assert decode.worker.stats().decode.num_remote_done == 0
        assert prefill.worker.stats().prefill.num_prefills == 0
        difference = "tail_tokens of region kv is {} there, {} here"
        both = {
            f"no KV is exchanged with {decode.id}: {difference.format(tails[1], tails[0])}",
            f"no KV is exchanged with {prefill.id}: {difference.format(tails[0], tails[1])}",
        }
        await shared.until(lambda: both <= {record.getMessage() for record in caplog.records})


async def test_a_claim_of_another_tail_is_refused() -> None:
    """Whatever its digest says."""
    async with paired(1) as pair:
        ledger = pair.prefill.outgoing
        ledger.rules = msgspec.structs.replace(ledger.rules, tail_tokens=2)
        assert await ask(pair, HandoffOrder.DECODE_FIRST, prompt(300)) == expected(prompt(300), 8)
        assert pair.num_remote == 0
        assert pair.prefill.worker.stats().prefill.num_refused == 1


async def test_a_grant_of_another_tail_is_given_up() -> None:
    async with paired(1) as pair:
        send = pair.decode.server.send

        def forging(peer, message):
            if isinstance(message, HandoffGrant):
                message = msgspec.structs.replace(message, tail_tokens=0)
            return send(peer, message)

        pair.decode.server.send = forging
        assert await ask(pair, HandoffOrder.DECODE_FIRST, prompt(300)) == expected(prompt(300), 8)
        assert pair.num_remote == 0


@pytest.mark.parametrize(("tail_tokens", "token_id"), [(1, 5), (0, None)])
async def test_a_first_token_that_should_not_be_there_or_is_missing_is_computed(
    tail_tokens: int, token_id: int | None
) -> None:
    async with paired(tail_tokens) as pair:
        resume = pair.decode.core.resume_handoff
        pair.decode.core.resume_handoff = lambda handoff_id, loan, _, logprobs: resume(
            handoff_id, loan, token_id, logprobs
        )
        assert await ask(pair, HandoffOrder.DECODE_FIRST, prompt(300)) == expected(prompt(300), 8)
        assert pair.num_remote == 0
