"""Measuring: what shared prefixes a data set holds, and how a serving system behaves under load.

The room speaks HTTP only, so it measures any OpenAI-compatible server; it knows nothing of engines, workers or the
control plane. ``prefixes`` is the repetition measure, ``load`` makes requests and arrival times, ``client`` sends
them and stamps what comes back, ``report`` turns stamps into figures, ``commands`` is the command line.
"""
