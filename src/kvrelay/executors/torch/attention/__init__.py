"""Attention over the paged KV pool: ``base`` is the contract, ``torch.build`` chooses the implementation."""
