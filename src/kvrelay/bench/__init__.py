"""Measuring: the shared prefixes of a data set, a server's behaviour under load, and the speed of single parts.

The top room: it may use every other room, and the command line knows it by name only. A serving run speaks HTTP, so it
measures any OpenAI-compatible server. ``commands`` is the command line, ``load`` makes requests and arrival times,
``client`` sends them and time-stamps the answers, ``report`` turns stamps into figures, ``prefixes`` is the repetition
measure, ``parts`` measures engine, router and transfer in this process, and ``chaos`` breaks a cluster under load.
"""
