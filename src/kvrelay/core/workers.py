"""A worker's entries in discovery: its identity, model, address, and the workers with which it can exchange KV.

``control_codec`` checks the ranges in the types when it reads an entry.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.core.layout import Compatibility, KVLayout

WorkerId = Annotated[str, msgspec.Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
"""Part of keys and subjects."""
Name = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
PositiveCount = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Address = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
LeaseTime = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]
"""Seconds."""


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's entry in discovery, readable JSON under ``kvrelay/NAMESPACE/workers/WORKER_ID``.

    ``worker_id`` is new at every start; ``epoch`` counts role changes. ``address`` is the ZMQ request plane.
    ``model_path`` lets a frontend on the same machine find the tokenizer; ``kv_compatibility`` is
    ``Compatibility.digest()``. ``public_key`` is the CURVE key that ``address`` asks for, empty if it is open.
    ``weights_fingerprint`` says whether two workers of one name give the same answers,
    ``tokenizer_fingerprint`` whether a frontend's copy of the tokenizer is this worker's (empty: unknown).
    ``lease_ttl_s``: silent for so long, it is gone; who connects to it chooses heartbeats by that.
    A rank of a data-parallel group is a worker of its own: rank ``dp_rank`` of the ``dp_size`` ranks of ``dp_group``
    (empty: no group). ``dp_parent_pid`` is the process that started the group's ranks.
    ``pulls_prefills``: it takes prefills from the queue, also if it does ``both``.
    ``reads_prefixes``: it reads prefixes from other workers' caches, and lends its own (``worker/prefixes.py``).
    ``adapter``: the adapter (LoRA) of the model that it serves (empty: none); block hashes depend on it.
    ``adapters``: the ids of those that a request may ask for now (``core/adapters.py``). ``max_adapters``: how many it
    can have with those that are loaded at run time (0: none are). ``refused_adapters``: the ids of those that it could
    not load, each with the reason.
    ``after_crash``: how the process that it replaces ended, if that crashed and the same supervisor started both.
    ``release`` is kvrelay's version (empty: one that does not tell); ``version`` is that of this struct.
    """

    worker_id: WorkerId
    epoch: Count
    role: WorkerRole
    model: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    model_path: Annotated[str, msgspec.Meta(max_length=4096)]
    address: Name
    max_model_len: PositiveCount
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    num_blocks: Count
    vocab_size: PositiveCount
    kv_compatibility: Name
    host: Name = ""
    pid: Count = 0
    engine: Name = "torch"
    transport: Name = "nixl"
    max_num_seqs: Count = 0
    public_key: Name = ""
    weights_fingerprint: Name = ""
    tokenizer_fingerprint: Name = ""
    lease_ttl_s: LeaseTime = 10.0
    dp_group: Name = ""
    dp_rank: Count = 0
    dp_size: PositiveCount = 1
    dp_parent_pid: Count = 0
    release: Name = ""
    pulls_prefills: bool = False
    reads_prefixes: bool = False
    adapter: Name = ""
    adapters: tuple[Name, ...] = ()
    max_adapters: Count = 0
    refused_adapters: dict[Name, Name] = {}
    after_crash: Name = ""
    version: int = 1


class KvMetadata(msgspec.Struct, frozen=True):
    """A worker's KV memory in discovery, under ``kvrelay/NAMESPACE/kv_metadata/WORKER_ID/RANK``: put once, after
    the pool is allocated; loaded and cached by a peer at first use.

    ``agent`` is the transport's own opaque connection blob, for a worker with ranks one of each that moves its own KV
    (``transfer.ranks``); ``address`` and ``num_bytes`` bound the pool in the
    worker's memory; block b lies at ``address + b * block_bytes``. ``public_key`` is the one of ``WorkerInfo``: a
    worker that drains has left the list of workers, but its hand-offs go on. The worker calls others with the same key,
    and is known by it. ``layout``: how its ranks and blocks hold the model's KV (``address`` and
    ``num_bytes`` span all ranks). ``terms``: what ``kv_compatibility`` is the digest of, so that a difference has a
    name. ``lease_ttl_s``: it may write for so long after its last sign of life.
    ``term`` rises when it has withdrawn everything that it had begun (``handoff/leases.py``).
    """

    worker_id: WorkerId
    rank: Count
    transport: Name
    agent: bytes
    address: Address
    num_bytes: Address
    block_bytes: Address
    device: Name
    device_id: Count
    kv_compatibility: Name
    public_key: Name = ""
    lease_ttl_s: LeaseTime = 10.0
    term: Count = 0
    layout: KVLayout | None = None
    terms: Compatibility | None = None
    version: int = 1


class CallerInfo(msgspec.Struct, frozen=True):
    """A frontend's or an operator's entry in discovery, under ``kvrelay/NAMESPACE/frontends/CALLER_ID`` or
    ``.../operators/CALLER_ID``: workers let in who proves to hold the secret half of ``public_key`` (CURVE, Z85 text).
    It hangs on its process's lease. ``url``: where a frontend listens, for operators' commands."""

    caller_id: str
    public_key: str
    host: str = ""
    pid: int = 0
    version: int = 1
    url: str = ""
