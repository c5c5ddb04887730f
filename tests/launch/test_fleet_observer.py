"""What the planner sees of a worker that answers nonsense: nothing, and the others as they are."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from kvrelay.config import WorkerRole
from kvrelay.control.base import Keys
from kvrelay.control.memory import MemoryBroker
from kvrelay.core.events import LoadMetrics
from kvrelay.core.messages import AdminReply, AdminRequest
from kvrelay.core.step_cost import StepCost
from kvrelay.core.workers import WorkerInfo
from kvrelay.errors import ProtocolError
from kvrelay.frontend.cluster.figures import Second
from kvrelay.launch.fleet_observer import FleetObserver, measured_in
from kvrelay.launch.worker_calls import WorkerCalls, answer_of
from kvrelay.planner import Measured, WorkerView
from kvrelay.rpc.zmq_socket import new_curve_keys
from kvrelay.worker.worker import Worker

KEYS = Keys("default")
LOAD = msgspec.to_builtins(LoadMetrics("w", 3, 8, 10, 100, 2, 0.1, 0.5, num_decoding=1, step_cost=StepCost()))


class Answering(WorkerCalls):
    def __init__(self, payload: str) -> None:
        super().__init__(new_curve_keys())
        self._reply = AdminReply(1, payload)

    async def ask(self, worker_id: str, command: str, argument: str = "", *, timeout_s: float) -> Any:
        return answer_of(worker_id, self._reply)


async def view(payload: str) -> WorkerView:
    plane = MemoryBroker().plane()
    info = WorkerInfo("w", 0, WorkerRole.DECODE, "m", "m", "tcp://h:1", 4096, 16, 100, 2000, "k")
    await plane.discovery.put(KEYS.worker("w"), msgspec.json.encode(info), await plane.discovery.grant(60.0))
    fleet, _ = await FleetObserver(plane, KEYS, Answering(payload)).look()
    await plane.close()
    return fleet.workers[0]


def status(**changes: object) -> str:
    return msgspec.json.encode({"worker_id": "w", "role": "decode", "num_steps": 1, "load": LOAD | changes}).decode()


async def test_a_sound_status_is_seen() -> None:
    seen = await view(status())
    assert (seen.is_ready, seen.num_running, seen.num_admitted, seen.step_cost) == (True, 1, 3, StepCost())


@pytest.mark.parametrize(
    "payload",
    ["{", '{"load": NaN}', "[" * 100_000, status(kv_active_blocks=-1), status(request_active_slots=2**63), "1" * 5000],
)
async def test_a_worker_that_answers_nonsense_is_not_ready(payload: str) -> None:
    assert not (await view(payload)).is_ready


def test_what_clients_got_needs_some_requests() -> None:
    """19 of 20 first tokens within 0.1 s, and most tokens within 25 ms."""
    ttft, itl = (0,) * 5 + (19, 0, 0, 0, 0, 1), (0,) * 5 + (70, 30)
    row = Second(1, ttft=ttft, itl=itl)
    assert measured_in(row) == Measured(ttft_s=(0.05, 0.1), itl_s=(0.01, 0.025))
    assert measured_in(Second(1, ttft=(19,), itl=itl)) is None
    late = measured_in(Second(1, ttft=(0,) * 14 + (20,), itl=itl))
    assert late is not None
    assert late.ttft_s == (60, 1e9)


async def test_an_impossible_cost_is_no_cost() -> None:
    seen = await view(status(step_cost=msgspec.to_builtins(StepCost(step_s=-1.0))))
    assert (seen.is_ready, seen.step_cost) == (True, None)


async def test_a_worker_answers_json_whatever_its_numbers_are(monkeypatch: pytest.MonkeyPatch) -> None:
    async def perform(worker: Worker, message: AdminRequest) -> object:
        return {"error": math.inf, "role": WorkerRole.DECODE}

    monkeypatch.setattr(Worker, "_perform", perform)
    reply = await Worker.run_admin_command(object.__new__(Worker), AdminRequest(1, "status"))
    assert answer_of("w", reply) == {"error": None, "role": "decode"}


def test_an_answer_that_is_no_json_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="w is no JSON"):
        answer_of("w", AdminReply(1, "{"))
