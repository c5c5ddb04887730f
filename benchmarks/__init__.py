"""What proves this project's own figures: scripts over ``kvrelay.bench.compare``, run from a checkout.

``python -m benchmarks NAME``. A script declares its options, measures, and prints a table or, with ``--json``, one
object. Docs name the command of each figure (``docs/performance.md``).
"""
