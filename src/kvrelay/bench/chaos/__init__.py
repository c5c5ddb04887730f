"""Chaos: a real cluster under steady load with known answers, while its parts are killed, stopped and moved about.

It knows the cluster as an operator does: by pid, by signals, by ``kvrelay``'s own orders and over HTTP.
"""
