"""The collector: seldom while a process starts; what exists when it is ready is not looked at again."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref

from kvrelay.core.garbage import YOUNG_OBJECTS, collect_seldom, spare_what_stays


class Node:
    def __init__(self) -> None:
        self.me = self


def test_what_stays_is_spared_and_later_cycles_are_still_collected() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        collect_seldom()
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:])
        garbage = weakref.ref(Node())
        spare_what_stays()
        assert garbage() is None, "what was garbage then is gone"
        assert gc.get_freeze_count() > frozen
        later = weakref.ref(Node())
        gc.collect()
        assert later() is None
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def test_no_collection_looks_through_all_that_a_worker_imports() -> None:
    program = (
        "import gc, importlib, kvrelay.cli.main as main; main.run = lambda arguments: 0\n"
        "try: main.main([])\n"
        "except SystemExit: pass\n"
        "before = gc.get_stats()[2]['collections']\n"
        "importlib.import_module('kvrelay.executors.torch.attention.cpu')\n"
        "print(gc.get_stats()[2]['collections'] - before)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=True, capture_output=True).stdout == b"0\n"
