"""Executors: each runs a step on a device behind ``engine.step.Executor``. ``engines.registry`` builds them by name.

``torch`` computes real models. ``mock`` replaces the model by a timing model, with a KV pool that detects damage.
"""
