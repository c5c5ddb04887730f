"""Step synchronisation of a data-parallel group: all ranks run the same steps, without waves and without polling.

``protocol`` has the state machines, which are pure. Nothing outside ``engine`` and the executor's collective knows of
steps.
"""
