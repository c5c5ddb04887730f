"""The policy of a step: scheduler, block pool, prefix cache, loans to hand-offs. No torch, no sockets, no asyncio.

``contract`` is what a worker needs of any engine, ``step`` what this one needs of an executor; ``core.EngineCore`` is
the door.
"""
