"""Step synchronisation of a data-parallel group: all ranks run the same steps, without waves and without polling.

``protocol`` (steps) and ``roster`` (who is there) are pure state machines. ``server`` and ``member`` carry their
messages over sockets, ``shared_steps`` carries steps through shared memory. ``group`` is what an engine sees of it all.
Nothing outside ``engine`` and the executor's collective knows of steps.
"""
