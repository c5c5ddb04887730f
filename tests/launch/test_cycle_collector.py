"""The collector in a process that serves: what exists when it is ready is not looked at again."""

from __future__ import annotations

import gc
import weakref

from kvrelay.launch.process import YOUNG_OBJECTS, spare_what_stays


class Node:
    def __init__(self) -> None:
        self.me = self


def test_what_stays_is_spared_and_later_cycles_are_still_collected() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        garbage = weakref.ref(Node())
        spare_what_stays()
        assert garbage() is None, "what was garbage then is gone"
        assert gc.get_freeze_count() > frozen
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
