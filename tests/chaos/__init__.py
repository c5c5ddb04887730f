"""Chaos: a real cluster under steady load with known answers, while its processes are killed, stopped and moved.

It controls the cluster like an operator: by pid, by signals, by ``kvrelay``'s admin commands and over HTTP.
"""
