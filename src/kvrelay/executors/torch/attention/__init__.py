"""Attention over the paged KV pool: ``base`` is the contract, ``build_attention`` chooses the implementation."""
