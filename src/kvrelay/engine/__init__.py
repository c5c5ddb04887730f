"""The policy of a step: scheduler, block pool, prefix cache, loans to hand-offs. No torch, no sockets, no asyncio.

``base`` is the contract with whatever computes a step and with the worker; ``core.EngineCore`` is the door.
"""
