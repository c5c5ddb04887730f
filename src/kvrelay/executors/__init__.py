"""Executors: each runs a step on a device behind ``engine.base.Executor``, whose suite is ``tests/contracts``.

``torch`` computes real models; ``mock`` stands in for one, with a timing model and a KV pool that notices damage.
Importing this package imports neither.
"""
