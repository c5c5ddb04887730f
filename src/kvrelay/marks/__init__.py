"""Phase marks: when a request reached which phase, in which process, and the waterfall that they add up to.

    worker ── add ──> Recorder ── take ──> ProcessMarks ──> on messages that exist anyway ──> the frontend's Trace
                                                                                                │
                         Kept: failed, slowest, sampled, recent  <── end ───────────────────────┘──> waterfall()

A mark is a phase, a time and a number. Prompts and answers are never in one. This room knows no
engine, and no sockets but those to a collector of traces (``otlp.py``).
"""
