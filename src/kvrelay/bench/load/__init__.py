"""Load: which requests are sent, and when. Pure: seeded generators, no sockets, no clock.

``request`` is the vocabulary; ``generated``, ``readable`` and ``files`` are the data sets; ``arrivals`` gives times;
``mix`` puts named classes of requests side by side.
"""
