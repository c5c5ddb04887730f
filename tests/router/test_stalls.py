"""A worker at one step for long gets no requests while another gets on."""

from __future__ import annotations

import msgspec
import pytest
from tests.router.test_router import OVERLAP, PLAIN, load_of, request, router, worker

from kvrelay.errors import WorkerUnavailableError
from kvrelay.router import Router
from kvrelay.router.load import Stalls


def say(built: Router, name: str, step_age_s: float, seq: int) -> None:
    built.apply_metrics(msgspec.structs.replace(load_of(name, seq=seq), step_age_s=step_age_s))


def chosen(built: Router, count: int = 30) -> set[str]:
    return {built.choose(request(f"r{number}")).worker_id for number in range(count)}


@pytest.mark.parametrize("policy", [*PLAIN, *OVERLAP])
def test_a_stalled_worker_is_avoided_until_it_gets_on(policy: str) -> None:
    built = router(policy, "a", "b", "c")
    say(built, "b", 2.9, seq=1)
    assert chosen(built) == {"a", "b", "c"}
    say(built, "b", 3.0, seq=2)
    assert chosen(built) == {"a", "c"}
    assert {score.worker_id for score in built.explain(request("x")).candidates} == {"a", "c"}
    say(built, "b", 0.0, seq=3)
    assert "b" in chosen(built, 100)


@pytest.mark.parametrize("policy", [*PLAIN, *OVERLAP])
def test_when_all_are_at_a_long_step_none_is_avoided(policy: str) -> None:
    built = router(policy, "a", "b")
    say(built, "a", 5.0, seq=1)
    say(built, "b", 9.0, seq=1)
    assert chosen(built, 60) == {"a", "b"}
    # Better a stalled worker than none: the other one has failed this request.
    assert built.choose(request("x", exclude=("a",))).worker_id == "b"
    say(built, "b", 0.0, seq=2)
    assert built.choose(request("y", exclude=("b",))).worker_id == "a"
    with pytest.raises(WorkerUnavailableError):
        built.choose(request("z", exclude=("a", "b")))


def test_a_worker_that_comes_back_is_judged_anew() -> None:
    built = router("round-robin", "a", "b")
    say(built, "b", 5.0, seq=1)
    built.remove_worker("b")
    built.add_worker(worker("b"))
    assert chosen(built) == {"a", "b"}


def test_zero_turns_avoidance_off() -> None:
    stalls = Stalls()
    stalls.heard("a", 100.0)
    assert stalls.avoidable(0.0, {"a": 0}.get, (), 2) == []
    assert stalls.avoidable(1.0, {"a": 0}.get, (), 2) == [0]
    assert stalls.avoidable(1.0, {"a": 0}.get, [0], 2) == []
