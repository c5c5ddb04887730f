"""Executors: each runs a step on a device behind ``engine.step.Executor``. The door is ``build_executor``.

``torch`` computes real models. ``mock`` replaces the model by a timing model, with a KV pool that detects damage.
``openai`` and ``vllm`` are whole engines instead of executors: a running server computes, or vLLM in a process of the
worker. Importing this package imports none of them.
"""

from kvrelay.executors.registry import ExecutorSettings, build_executor, build_host, engine_names

__all__ = ["ExecutorSettings", "build_executor", "build_host", "engine_names"]
