"""Measuring servers, the engine, transfers between processes, and the shared prefixes of a data set.

The top room: it may use every other room, and the command line knows it by name only. A serving run speaks HTTP, so it
measures any OpenAI-compatible server. ``commands`` is the command line, ``load`` makes requests and arrival times,
``client`` sends them and time-stamps the answers, ``report`` turns stamps into figures, ``compare`` runs servers in
turns, ``prefixes`` is the repetition measure. What proves this project's own figures is not in the package: it is in
``benchmarks`` and ``tests/chaos`` of the repository.
"""
