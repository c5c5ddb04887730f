"""What the tests of faults measure on their way; ``conftest`` makes it properties of the test.

``pytest tests/system --junitxml=faults.xml && python tools/fault_table.py faults.xml`` prints it as the table of
docs/reliability.md wants it. Nothing is asserted here: figures from a busy machine fail no test.
"""

from __future__ import annotations

pauses_s: list[float] = []
"""The longest silence of any stream, each time that streams were checked."""
recoveries_s: list[float] = []
"""How long it took until all workers were there again and idle, each time that this was waited for."""


def clear() -> None:
    pauses_s.clear()
    recoveries_s.clear()


def properties() -> dict[str, str]:
    """The worst of each. The first wait of a test is for its own beginning."""
    found = {}
    if pauses_s:
        found["longest_pause_s"] = f"{max(pauses_s):.2f}"
    if recoveries_s[1:]:
        found["whole_again_s"] = f"{max(recoveries_s[1:]):.1f}"
    return found
