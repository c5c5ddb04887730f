"""What the planner sees of workers: what frontends have heard of them lately; of nonsense nothing."""

from __future__ import annotations

import asyncio
import math

import msgspec
import pytest
from tests.patience import PATIENCE_S

from kvrelay.config import WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.events import LoadMetrics, TokenCounts
from kvrelay.core.messages import AdminReply, AdminRequest
from kvrelay.core.step_cost import StepCost
from kvrelay.core.workers import CallerInfo, WorkerInfo
from kvrelay.errors import ProtocolError, WorkerUnavailableError
from kvrelay.frontend.cluster.figures import HeardLoad
from kvrelay.frontend.cluster.frontends import FiguresReply
from kvrelay.frontend.cluster.seconds import Second
from kvrelay.launch import worker_calls
from kvrelay.launch.fleet_observer import FleetObserver, is_ready, measured_in
from kvrelay.launch.worker_calls import WorkerCalls, answer_of
from kvrelay.planner import Measured, WorkerView
from kvrelay.rpc import new_curve_keys
from kvrelay.rpc.loopback import LoopbackNetwork
from kvrelay.worker.worker import Worker

KEYS = Keys("default")
LOAD = LoadMetrics("w", 3, 8, 10, 100, 2, 0.1, 0.5, num_running=1, step_cost=StepCost(), tokens=TokenCounts(90, 40, 7))


async def view(*answers: bytes) -> WorkerView:
    """Of the worker w, as frontends answer. What the planner asks of the worker itself nobody would answer."""
    plane = MemoryBroker().plane()
    lease = await plane.discovery.grant(60.0)
    info = WorkerInfo("w", 0, WorkerRole.DECODE, "m", "m", "tcp://h:1", 4096, 16, 100, 2000, "k")
    await plane.discovery.put(KEYS.worker("w"), msgspec.json.encode(info), lease)
    for number, answer in enumerate(answers):

        async def tell(_: bytes, answer: bytes = answer) -> bytes:
            return answer

        name = f"f{number}"
        await plane.discovery.put(KEYS.frontend(name), msgspec.json.encode(CallerInfo(name, "key", "h", 1)), lease)
        await plane.events.serve(KEYS.frontend_figures(name), tell)
    fleet, _ = await FleetObserver(plane, KEYS, WorkerCalls(plane, KEYS, new_curve_keys())).look()
    await plane.close()
    return fleet.workers[0]


def told(age_s: float = 0.5, **changes: object) -> bytes:
    """By a frontend. What a load cannot be goes out all the same."""
    load = msgspec.to_builtins(LOAD) | changes
    reply = msgspec.to_builtins(FiguresReply("f", 0, ())) | {"loads": [[load, age_s]]}
    return msgspec.msgpack.encode(reply)


async def test_what_a_frontend_has_heard_is_seen() -> None:
    seen = await view(told())
    assert (seen.worker_id, seen.role, seen.is_ready, seen.block_size) == ("w", WorkerRole.DECODE, True, 16)
    assert (seen.load, seen.tokens) == (LOAD, TokenCounts(90, 40, 7))


async def test_of_two_frontends_the_one_that_has_heard_it_last_counts() -> None:
    assert (await view(told(9.0, num_decoding=5), told(0.1, num_decoding=6))).load.num_running == 6
    assert (await view(told(0.1, num_decoding=6), told(9.0, num_decoding=5))).load.num_running == 6


@pytest.mark.parametrize(
    "answer",
    [b"", b"\xc1", told(kv_active_blocks=-1), told(request_active_slots=2**63), told(-1.0), told(worker_id="x")],
)
async def test_a_worker_of_which_nothing_sound_is_told_is_not_ready(answer: bytes) -> None:
    seen = await view(answer)
    assert (seen.worker_id, seen.is_ready, seen.load.num_running) == ("w", False, 0)


async def test_an_impossible_cost_is_no_cost() -> None:
    seen = await view(told(step_cost=msgspec.to_builtins(StepCost(step_s=-1.0))))
    assert (seen.is_ready, seen.load.step_cost) == (True, None)


IDLE = {"num_admitted": 0, "num_waiting": 0}


@pytest.mark.parametrize(
    ("age_s", "changes", "expected"),
    [
        (4.0, {}, True),
        (6.0, {}, False),  # at work it repeats its sample every second
        (34.0, IDLE, True),
        (36.0, IDLE, False),
        (1.0, {"step_age_s": 8.0}, True),
        (2.5, {"step_age_s": 8.0}, False),
        (0.0, {"tokens": TokenCounts()}, False),
        (0.0, {"tokens": None}, False),
        (0.0, {"tokens": TokenCounts(), **IDLE}, True),
    ],
)
def test_a_worker_is_ready_while_it_is_heard_and_its_steps_go_on(
    age_s: float, changes: dict[str, object], expected: bool
) -> None:
    assert is_ready(HeardLoad(msgspec.structs.replace(LOAD, **changes), age_s)) is expected


def test_what_clients_got_needs_some_requests() -> None:
    """19 of 20 first tokens within 0.1 s, and most tokens within 25 ms."""
    ttft, itl = (0,) * 5 + (19, 0, 0, 0, 0, 1), (0,) * 5 + (70, 30)
    row = Second(1, ttft=ttft, itl=itl)
    assert measured_in(row) == Measured(ttft_s=(0.05, 0.1), itl_s=(0.01, 0.025))
    assert measured_in(Second(1, ttft=(19,), itl=itl)) is None
    late = measured_in(Second(1, ttft=(0,) * 14 + (20,), itl=itl))
    assert late is not None
    assert late.ttft_s == (60, 1e9)


async def test_a_worker_answers_json_whatever_its_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def perform(worker: Worker, message: AdminRequest) -> object:
        return {"error": math.inf, "role": WorkerRole.DECODE}

    monkeypatch.setattr(Worker, "_perform", perform)
    reply = await Worker.run_admin_command(object.__new__(Worker), AdminRequest(1, "status"))
    assert answer_of("w", reply) == {"error": None, "role": "decode"}


def test_an_answer_that_is_no_json_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="w is no JSON"):
        answer_of("w", AdminReply(1, "{"))


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_worker_that_ends_meanwhile_answers_no_more(monkeypatch: pytest.MonkeyPatch, *, is_gone: bool) -> None:
    """A change of role may take ten minutes: nobody waits so long for the dead."""
    network, plane = LoopbackNetwork(), MemoryBroker().plane()
    server, asked = network.server(), asyncio.Event()
    server.on_message(lambda *_: asked.set())
    await server.start()
    monkeypatch.setattr(worker_calls, "client_of", lambda info, *_: network.client(info.address))
    info = WorkerInfo("w", 0, WorkerRole.DECODE, "m", "m", server.address, 4096, 16, 100, 2000, "k")
    await plane.discovery.put(KEYS.worker("w"), msgspec.json.encode(info), await plane.discovery.grant(60.0))
    calls = WorkerCalls(plane, KEYS, new_curve_keys())
    await calls.look()
    answer = asyncio.create_task(calls.ask("w", "role", "both", timeout_s=3600.0))
    await asyncio.wait_for(asked.wait(), PATIENCE_S)
    if is_gone:
        await plane.discovery.delete(KEYS.worker("w"))
        await calls.look()
    else:
        await server.close()
    with pytest.raises(WorkerUnavailableError, match="the connection to w was lost"):
        await asyncio.wait_for(answer, PATIENCE_S)
    await calls.close()
    await plane.close()
