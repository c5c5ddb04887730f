"""Measuring: what shared prefixes a data set holds, how a server behaves under load, what a part of it can do.

The top room: it may use every other, and the command line knows it by name only. A serving run speaks HTTP, so it
measures any OpenAI-compatible server. ``commands`` is the command line, ``load`` makes requests and arrival times,
``client`` sends them and stamps what comes back, ``report`` turns stamps into figures; ``prefixes`` is the repetition
measure, ``parts`` measures engine, router and transfer in this process, ``chaos`` breaks a cluster under load.
"""
