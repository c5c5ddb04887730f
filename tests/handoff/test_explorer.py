"""The protocol, model-checked: no reachable state is wrong, and none hangs.

The suite explores as many scenarios as find out every mutant of ``mutants``, and whole. Those marked ``matrix`` are for
continuous integration only (``make test-matrix``), some with more faults at once. That the explorer would notice is in
``test_mutants``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.draws import seeds
from tests.handoff.explorer import explore, wander
from tests.handoff.scenarios import FINDERS, MANY, SCENARIOS, THREE_FAULTS

from kvrelay.core.handoff import HandoffOrder, KvDirection

WHOLE = SCENARIOS | THREE_FAULTS


@pytest.mark.slow
@pytest.mark.timeout(1800)  # it computes only: the largest takes a minute alone, and many on a slow machine with others
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] * (name not in FINDERS)) for name in WHOLE]
)
def test_no_reachable_state_is_wrong_and_none_hangs(name: str) -> None:
    report = explore(WHOLE[name])
    print(f"{name}: {report}")
    assert report.violation is None, (report.violation, report.trace)
    assert report.is_complete


@pytest.mark.parametrize("seed", seeds(3, 90))
@pytest.mark.parametrize("direction", KvDirection)
@pytest.mark.parametrize("order", HandoffOrder)
def test_long_random_runs_of_many_hand_offs(seed: int, direction: KvDirection, order: HandoffOrder) -> None:
    report = wander(replace(MANY, direction=direction, order=order), seed)
    assert report.violation is None, (report.violation, report.trace[-40:])
