"""More faults at once than can be explored whole: up to a bound, fewer faults first."""

from __future__ import annotations

import pytest
from tests.handoff.explorer import explore
from tests.handoff.scenarios import LONG


@pytest.mark.matrix
@pytest.mark.parametrize("name", LONG)
def test_with_more_faults_at_once(name: str) -> None:
    """The report says how far that was."""
    report = explore(LONG[name], max_states=60_000)
    print(f"{name}: {report}")
    assert report.violation is None, (report.violation, report.trace)
    assert report.num_faults >= LONG[name].max_faults - 1
