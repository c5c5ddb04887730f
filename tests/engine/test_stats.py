"""When the load is sampled, on a clock moved by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest

from kvrelay.core.clock import ManualClock
from kvrelay.core.events import LoadMetrics
from kvrelay.engine.stats import LoadSampler

INTERVAL_S = 0.05


@dataclasses.dataclass
class Core:
    """An engine that is told how busy it is."""

    num_waiting: int = 0
    is_busy: bool = True
    num_asked: int = 0

    def has_work(self) -> bool:
        return self.is_busy

    def metrics(self) -> LoadMetrics:
        self.num_asked += 1
        return LoadMetrics(
            worker_id="w",
            num_admitted=0,
            num_slots=1,
            num_blocks_in_use=0,
            num_blocks=1,
            num_waiting=self.num_waiting,
            cache_usage=0.0,
            prefix_hit_rate=0.0,
        )


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def sampler(core: Core, clock: ManualClock) -> LoadSampler:
    return LoadSampler(core, INTERVAL_S, clock)


def waiting(load: LoadMetrics | None) -> int | None:
    return None if load is None else load.num_waiting


def test_while_it_works_the_engine_is_asked_once_in_an_interval(sampler, core, clock):
    seen = []
    for number in range(10):
        core.num_waiting = number
        seen.append(waiting(sampler.sample()))
        clock.advance(INTERVAL_S / 4)
    assert seen == [0, None, None, None, 4, None, None, None, 8, None]
    assert core.num_asked == 3


def test_the_last_step_is_sampled_whenever_it_comes(sampler, core):
    assert waiting(sampler.sample()) == 0
    core.num_waiting, core.is_busy = 7, False
    assert waiting(sampler.sample()) == 7


def test_who_asks_again_gets_the_last_step_when_a_sample_is_due(sampler, core, clock):
    assert (waiting(sampler.sample(may_put_off=True)), sampler.owed_in_s) == (0, math.inf)
    core.num_waiting, core.is_busy = 7, False
    assert sampler.sample(may_put_off=True) is None
    assert sampler.owed_in_s == pytest.approx(INTERVAL_S)
    clock.advance(2 * INTERVAL_S)
    assert sampler.owed_in_s == 0.0
    assert (waiting(sampler.sample(may_put_off=True)), sampler.owed_in_s) == (7, math.inf)
    assert core.num_asked == 2


def test_what_has_not_changed_is_not_sent_again(sampler, core, clock):
    assert waiting(sampler.sample()) == 0
    clock.advance(INTERVAL_S)
    assert sampler.sample() is None
    core.num_waiting = 1
    clock.advance(INTERVAL_S)
    assert waiting(sampler.sample()) == 1
