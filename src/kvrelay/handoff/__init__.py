"""The hand-off of a prefill between two workers: a pure protocol. The door is ``base.py``."""
