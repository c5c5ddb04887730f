"""Prefix repetition: which prefixes a set of conversations shares, and what a prefix cache could make of it.

``radix`` finds the shared prefixes, ``blocks`` the hit ratios of caches, ``measure`` reads files and puts both into
one result, ``render`` shows it. Nothing here talks to a server.
"""
