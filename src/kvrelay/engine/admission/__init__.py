"""Admission in a worker process, from a request's arrival to its first block.

    event loop                                engine thread
    AdmissionControl.admit ──post──> AdmissionControl.received, then AdmissionLimits.check, then AdmissionQueue.push
        checks AdmissionLimits at once,                                                               │
        also while a step runs                                            AdmissionQueue.admit  <─────┘  in each step

``limits.py`` has the two bounds above which a request is refused (429). ``control.py`` applies them on arrival, without
waiting for the engine's step. ``queue.py`` decides which accepted request gets blocks next, in the order of
``fair.py``.
"""
