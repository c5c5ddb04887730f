"""The name of an adapter's (LoRA's) contents: ``NAME@DIGEST``, the adapter's id.

Clients ask for an adapter by NAME. Everything that depends on its weights goes by the id: block hashes, cache events,
and which workers a request may run on. So the KV of two contents of one name is never confused.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrelay.core.workers import Name


def adapter_id(name: str, digest: str) -> str:
    return f"{name}@{digest}"


def adapter_name(adapter: str) -> str:
    """The name in an id. A digest has no @."""
    return adapter.rpartition("@")[0]


class AdapterEntry(msgspec.Struct, frozen=True):
    """An adapter that was loaded at run time, readable JSON under ``kvrelay/NAMESPACE/adapters/NAME``. It has no lease,
    like a setting: workers that join later load it, too. ``path``: the directory of its files, where workers see it.
    ``digest``: of their contents when it was loaded; other contents there are refused."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    model: Name
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    version: int = 1

    @property
    def id(self) -> str:
        return adapter_id(self.name, self.digest)
