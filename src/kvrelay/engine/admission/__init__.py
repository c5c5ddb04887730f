"""Which accepted request gets blocks next: ``queue.py``, in the order of ``fair.py``. Below the scheduler.

    event loop                                engine thread
    AdmissionControl.admit ──post──> AdmissionControl.received, then AdmissionLimits.check, then AdmissionQueue.push
        checks AdmissionLimits at once,                                                               │
        also while a step runs                                            AdmissionQueue.admit  <─────┘  in each step

``engine/limits.py``, above the scheduler, has the two bounds above which a request is refused (429).
``worker/decode/admission.py`` applies them on arrival, without waiting for the engine's step.
"""
