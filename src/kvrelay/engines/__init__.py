"""Whole engines, which schedule by themselves and implement ``engine.contract``. The door is ``registry``.

``openai``: a running server computes. ``vllm``: vLLM in a process of the worker. ``hosted`` is what they share,
``connector`` the code inside vLLM's processes. Importing this package imports none of them.
"""
