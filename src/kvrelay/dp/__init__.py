"""Step synchronisation of a data-parallel group: all ranks run the same steps, without waves and without polling.

``protocol`` (steps) and ``roster`` (the members) are pure state machines. ``server`` and ``member`` carry their
messages over sockets, ``shared_steps`` carries steps through shared memory. An engine uses only ``group``. Nothing
outside ``engine`` and the executor's collective knows of steps.
"""
