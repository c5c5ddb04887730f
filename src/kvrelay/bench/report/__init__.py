"""From stamps to figures: pure calculation (``statistics``, ``records``, ``metrics``), then text, JSON and plots.

Nothing in here reads a clock or a socket, so every figure can be checked exactly.
"""
