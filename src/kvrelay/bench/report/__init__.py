"""From timestamps to figures: pure calculation (``metrics``), then text, JSON and plots.

No module here reads a clock or a socket, so every figure can be tested exactly.
"""
