"""Python's collector of cyclic garbage in a process that serves.

Requests allocate thousands of objects a second, and nearly all of them die by their reference count. The collector's
default is to look at every 700 new objects, and now and then at all objects of the process, which stops the event loop
for tens of milliseconds.
"""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 5000
"""New container objects between two collections."""


def spare_what_stays() -> None:
    """Call once the process is ready: later collections skip the objects that exist now (modules, weights, tables)."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
