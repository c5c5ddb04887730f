"""The simulator: the real policies on a virtual clock. ``simulate`` is the door; ``docs/simulator.md`` describes it."""
