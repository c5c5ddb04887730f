"""The name of an adapter's (LoRA's) contents: ``NAME@DIGEST``, the adapter's id.

Clients ask for an adapter by NAME. Everything that depends on its weights goes by the id: block hashes, cache events,
and which workers exchange KV. So the KV of two contents of one name is never confused.
"""

from __future__ import annotations


def adapter_id(name: str, digest: str) -> str:
    return f"{name}@{digest}"


def adapter_name(adapter: str) -> str:
    """The name in an id. A digest has no @."""
    return adapter.rpartition("@")[0]
