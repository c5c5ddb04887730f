"""Engines whose tokens come as streams from something that schedules by itself: a server, or a library.

    frontend ──> worker (BackendHost, HostedEngine) ── Backend ──> a running server, or vLLM in this process
                    discovery, routing, admission, drain, migration as for every worker

``backend.py`` is the contract. The engine here keeps the requests, checks each piece of an answer, and ends answers;
the host gives it a thread with an event loop, in which ``calls`` runs a task for each answer. The cache is known from
the backend's own events, or estimated from the requests that the backend was given (``cache``). ``costs`` knows what
the backend's steps cost, from its ``step_log`` or its answers; by them ``placing`` chooses where a prompt is computed.
Hand-offs are of one of two kinds: backends move the KV by themselves (``handoffs``), or it goes through blocks of the
worker (``staged``), in memory that the backend has mapped, too (``staging``).
"""
