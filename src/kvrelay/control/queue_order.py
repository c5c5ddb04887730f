"""The order in which a pull looks at the classes of the prefill queue. Pure.

Classes come in order, so a burst of one class could keep the later ones out for ever. Every ``AGEING_EVERY``-th pull
therefore begins with a later class, in turn: a share of the pulls, and no comparison of clocks.
"""

from __future__ import annotations

from kvrelay.core.handoff import QueueClass

AGEING_EVERY = 8
CLASSES = tuple(QueueClass)
_AGED = (QueueClass.NORMAL, QueueClass.LOW)


class QueueTurns:
    """Counts the pulls of one consumer."""

    def __init__(self) -> None:
        self._num_pulls = 0

    def next_order(self) -> tuple[QueueClass, ...]:
        """The classes for the next pull, each once."""
        self._num_pulls += 1
        turn, rest = divmod(self._num_pulls, AGEING_EVERY)
        if rest:
            return CLASSES
        first = _AGED[turn % len(_AGED)]
        return (first, *(item for item in CLASSES if item is not first))
