"""Prefix repetition: the prefixes that a set of conversations shares, and the hit ratios of prefix caches.

``radix`` finds the shared prefixes, ``blocks`` the hit ratios of caches, ``measure`` reads files, puts both into one
result and shows it. No module here talks to a server.
"""
