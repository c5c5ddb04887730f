"""The router behind its contract: every policy, workers that come, go, change roles, fail."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from kvrelay.config import RouterConfig
from kvrelay.core.clock import ManualClock
from kvrelay.core.workers import WorkerInfo, WorkerRole
from kvrelay.errors import ConfigError, WorkerUnavailableError
from kvrelay.router import PolicyRouter, RouterStage, RoutingRequest, build_router

PLAIN = ("round-robin", "random", "least-loaded", "power-of-two")


def worker(name: str, role: WorkerRole = WorkerRole.DECODE, epoch: int = 0, block_size: int = 4) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name,
        epoch=epoch,
        role=role,
        model="m",
        model_path="",
        address="tcp://127.0.0.1:1",
        max_model_len=4096,
        block_size=block_size,
        num_blocks=100,
        vocab_size=1000,
        kv_compatibility="x",
    )


def router(policy: str, *names: str) -> PolicyRouter:
    built = build_router(RouterConfig(router=policy), 4, ManualClock())  # type: ignore[arg-type]
    for name in names:
        built.add_worker(worker(name))
    return built


def request(request_id: str, num_tokens: int = 10, **fields: object) -> RoutingRequest:
    return RoutingRequest(request_id=request_id, token_ids=tuple(range(num_tokens)), **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", PLAIN)
def test_every_policy_chooses_among_the_registered(policy: str) -> None:
    built = router(policy, "a", "b", "c")
    chosen = {built.choose(request(f"r{number}")).worker_id for number in range(60)}
    assert chosen == {"a", "b", "c"}


@pytest.mark.parametrize("policy", PLAIN)
def test_excluded_workers_are_not_chosen(policy: str) -> None:
    built = router(policy, "a", "b", "c")
    for number in range(30):
        decision = built.choose(request(f"r{number}", exclude=("a", "c", "gone")))
        assert decision.worker_id == "b"
        assert [candidate.worker_id for candidate in decision.candidates] == ["b"]


@pytest.mark.parametrize("policy", PLAIN)
def test_nobody_left_is_an_error_that_can_be_retried(policy: str) -> None:
    built = router(policy)
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("r"))
    built.add_worker(worker("a"))
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("r", exclude=("a",)))
    built.add_worker(worker("p", WorkerRole.PREFILL))
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("r", exclude=("a",)))


def test_a_decision_shows_every_candidate() -> None:
    built = router("least-loaded", "a", "b")
    first = built.choose(request("r1", 10))
    second = built.choose(request("r2", 6))
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    shown = {candidate.worker_id: candidate for candidate in second.candidates}
    loaded = shown[first.worker_id]
    assert (loaded.prefill_tokens, loaded.decode_tokens, loaded.score) == (10, 10, -20)
    assert msgspec.json.decode(msgspec.json.encode(second), type=type(second)) == second


def test_load_leaves_with_the_request() -> None:
    built = router("least-loaded", "a", "b")
    heavy = built.choose(request("heavy", 100)).worker_id
    other = "b" if heavy == "a" else "a"
    assert [built.choose(request(f"r{number}", 10)).worker_id for number in range(3)] == [other] * 3
    built.first_token("heavy")
    built.finished("heavy", 5)
    assert built.choose(request("next")).worker_id == heavy


def test_explaining_places_nothing() -> None:
    built = router("least-loaded", "a")
    for _ in range(3):
        assert built.explain(request("r")).candidates[0].decode_tokens == 0


def test_a_role_change_takes_the_worker_out_and_back() -> None:
    built = router("round-robin", "a", "b")
    built.add_worker(worker("a", WorkerRole.PREFILL, epoch=1))
    assert {built.choose(request(f"r{number}")).worker_id for number in range(4)} == {"b"}
    built.add_worker(worker("a", WorkerRole.DECODE, epoch=0))  # a late echo of the past
    assert {built.choose(request(f"s{number}")).worker_id for number in range(4)} == {"b"}
    built.add_worker(worker("a", WorkerRole.BOTH, epoch=2))
    assert {built.choose(request(f"t{number}")).worker_id for number in range(4)} == {"a", "b"}


def test_the_prefill_stage_chooses_prefill_workers() -> None:
    built = build_router(RouterConfig(router="round-robin"), 4, ManualClock(), RouterStage.PREFILL)
    for name, role in (("p", WorkerRole.PREFILL), ("d", WorkerRole.DECODE), ("x", WorkerRole.BOTH)):
        built.add_worker(worker(name, role))
    assert {built.choose(request(f"r{number}")).worker_id for number in range(4)} == {"p", "x"}


def test_the_policy_changes_at_run_time_and_load_stays() -> None:
    built = router("round-robin", "a", "b")
    loaded = built.choose(request("r1", 50)).worker_id
    built.configure(dataclasses.replace(built.config, router="least-loaded"))
    decision = built.choose(request("r2"))
    assert decision.policy == "least-loaded"
    assert decision.worker_id != loaded


def test_an_impossible_block_size_is_refused() -> None:
    with pytest.raises(ConfigError):
        build_router(RouterConfig(), 0, ManualClock())
