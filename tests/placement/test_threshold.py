"""Remote or local: the formula, its edges, and thresholds that change at run time."""

import pytest

from kvrelay.config import DisaggConfig
from kvrelay.errors import ConfigError
from kvrelay.placement.base import PrefillLoad, PrefillPlace
from kvrelay.placement.threshold import DisaggPolicy


@pytest.mark.parametrize(
    ("prompt", "cached", "workers", "queued", "place"),
    [
        (1000, 0, 1, 0, PrefillPlace.REMOTE),
        (1000, 900, 1, 0, PrefillPlace.LOCAL_SHORT),
        (100, 0, 1, 0, PrefillPlace.LOCAL_SHORT),
        (101, 0, 1, 0, PrefillPlace.REMOTE),
        (1000, 899, 1, 1, PrefillPlace.REMOTE),
        (1000, 0, 1, 2, PrefillPlace.LOCAL_QUEUE_FULL),
        (1000, 0, 0, 0, PrefillPlace.LOCAL_NO_PREFILL_WORKER),
    ],
)
def test_decision(prompt, cached, workers, queued, place):
    policy = DisaggPolicy(DisaggConfig(max_local_prefill_length=100, max_prefill_queue_size=2))
    prefill_load = PrefillLoad(workers, queued)
    assert policy.decide(prompt_length=prompt, num_cached_tokens=cached, prefill_load=prefill_load) is place


def test_a_zero_threshold_sends_everything_away():
    policy = DisaggPolicy(DisaggConfig(max_local_prefill_length=0))
    prefill_load = PrefillLoad(1, 0)
    assert policy.decide(prompt_length=1, num_cached_tokens=0, prefill_load=prefill_load) is PrefillPlace.REMOTE


def test_what_only_a_local_prefill_gives_stays_local():
    policy = DisaggPolicy(DisaggConfig(max_local_prefill_length=0))
    place = policy.decide(prompt_length=5000, num_cached_tokens=0, prefill_load=PrefillLoad(1, 0), must_be_local=True)
    assert place is PrefillPlace.LOCAL_REQUIRED


def test_thresholds_change_at_run_time():
    policy = DisaggPolicy(DisaggConfig(max_local_prefill_length=100))
    policy.set("max_local_prefill_length", "2000")
    policy.set("max_prefill_queue_size", 7)
    assert (policy.config.max_local_prefill_length, policy.config.max_prefill_queue_size) == (2000, 7)
    for name, value in [("lease", 1), ("max_prefill_queue_size", "many"), ("max_prefill_queue_size", -1)]:
        with pytest.raises(ConfigError):
            policy.set(name, value)


def test_a_threshold_goes_back_to_what_was_given():
    given = DisaggConfig(max_local_prefill_length=100, max_prefill_queue_size=3)
    policy = DisaggPolicy(given)
    policy.set("max_local_prefill_length", 7)
    policy.set("max_prefill_queue_size", 7)
    policy.unset("max_local_prefill_length")
    assert (policy.config.max_local_prefill_length, policy.config.max_prefill_queue_size) == (100, 7)
    policy.unset("max_prefill_queue_size")
    policy.unset("max_prefill_queue_size")
    assert policy.config == given
    with pytest.raises(ConfigError):
        policy.unset("lease")
