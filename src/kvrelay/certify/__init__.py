"""``kvrelay doctor`` and ``kvrelay certify``: is prefill and decode apart right on *this* hardware, is it fast, does it
hold?

    doctor      what the machine has, without a model      doctor.py, probes.py
    certify     Right, Fast and Holds, with evidence       run.py (the plan), rows in kv.py, answers.py, holds.py

KV rows move patterns whose every word names its own place (``pattern``) between two ends, each a pool on a device with
the transport and the thread that workers use (``ends``). They do not know processes: an end is an object here or one in
another process (``peer``), and its device is the host, a GPU, or a test's fake. Rows about answers ask servers by their
API (``servers``). A row never raises for what it measures; it has a verdict and a reason (``findings``).
"""
