"""Load: which requests are sent, and when. Pure: seeded generators, no sockets, no clock.

``request`` is the vocabulary, ``datasets`` the data sets; ``mix`` puts named classes of requests side by side.
"""
