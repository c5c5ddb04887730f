"""When a process of kvrelay looks for cyclic garbage.

Nearly all that a start makes stays: modules, tables, weights. With Python's own settings 600 collections would look
through it while a worker starts, four of them through all of it: a tenth of the start's CPU time.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 5000
"""New container objects between two collections. Python's 700 are for processes with little memory."""


def collect_seldom() -> None:
    """Call first, before the heavy imports."""
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


def spare_what_stays() -> None:
    """Call once the process is ready: later collections skip the objects that exist now.

    Garbage of the start's last part is freed first. What older parts have left is a few dozen objects; to find them
    would stop a worker for 0.13 s when its first clients connect.
    """
    gc.collect(1)
    gc.freeze()
