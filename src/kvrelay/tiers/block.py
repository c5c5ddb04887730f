"""A stored block, and its proof: a header that says what it is, and a checksum of what it holds.

    [ format, fingerprint, hash, parent, sizes, checksum of the payload, checksum of the header ][ tokens ][ payload ]

The *fingerprint* stands for everything that must agree before KV may be used at all: model, weights, and the pool's
layout with its regions by name. The hash is the block's sequence hash, which covers the whole prefix and the client's
salt. The tokens make colliding hashes harmless.

``refusal`` reads the payload where it will be used, after the copy: what was damaged on the way is found too.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import msgspec
import xxhash

from kvrelay.core.layout import KVLayout

FORMAT = b"kvblock1"
_HEAD = struct.Struct("<8s16sQQIIQ")
_CHECK = struct.Struct("<Q")
HEADER_BYTES = _HEAD.size + _CHECK.size
TOKEN_BYTES = 4
ROOT = 2**64 - 1
"""In place of a parent's hash: the block begins the sequence."""


class BlockName(NamedTuple):
    """Which block it is. ``parent_hash`` None: the first of its sequence. ``tokens``: as
    ``core.hashing.token_blocks`` has them."""

    sequence_hash: int
    parent_hash: int | None
    tokens: bytes


class Shape(msgspec.Struct, frozen=True):
    """What all blocks of a store have in common. ``fingerprint``: 16 bytes."""

    fingerprint: bytes
    block_size: int
    block_bytes: int

    @property
    def header_bytes(self) -> int:
        """Of the header with the tokens."""
        return HEADER_BYTES + TOKEN_BYTES * self.block_size

    @property
    def stored_bytes(self) -> int:
        """Of a whole stored block."""
        return self.header_bytes + self.block_bytes

    @property
    def name(self) -> str:
        """The fingerprint as 32 hex digits."""
        return self.fingerprint.hex()


def shape_of(kv_compatibility: str, layout: KVLayout) -> Shape:
    """Of the blocks of a pool. ``kv_compatibility``: the worker's digest of model and weights."""
    described = msgspec.json.encode([FORMAT.decode(), kv_compatibility, layout])
    return Shape(xxhash.xxh3_128_digest(described), layout.block_size, layout.block_bytes)


def header_of(name: BlockName, shape: Shape, payload: memoryview) -> bytes:
    """The header of this block with its tokens, [shape.header_bytes]."""
    parent = ROOT if name.parent_hash is None else name.parent_hash
    checksum = xxhash.xxh3_64_intdigest(payload)
    num_tokens = len(name.tokens) // TOKEN_BYTES
    head = _HEAD.pack(FORMAT, shape.fingerprint, name.sequence_hash, parent, num_tokens, len(payload), checksum)
    return b"".join((head, _CHECK.pack(xxhash.xxh3_64_intdigest(head + name.tokens)), name.tokens))


def refusal(header: bytes | memoryview, name: BlockName, shape: Shape, payload: memoryview) -> str | None:
    """Why this is not the block ``name``; None if it is. A value of a small set, for counters."""
    if len(header) < shape.header_bytes or len(payload) != shape.block_bytes:
        return "short"
    head, tokens = header[: _HEAD.size], header[HEADER_BYTES : shape.header_bytes]
    mark, fingerprint, sequence_hash, parent, num_tokens, num_bytes, checksum = _HEAD.unpack(head)
    if mark != FORMAT:
        return "format"
    if _CHECK.unpack(header[_HEAD.size : HEADER_BYTES])[0] != xxhash.xxh3_64_intdigest(bytes(head) + bytes(tokens)):
        return "header"
    if fingerprint != shape.fingerprint:
        return "fingerprint"
    if sequence_hash != name.sequence_hash:
        return "hash"
    if num_tokens != shape.block_size or num_bytes != shape.block_bytes:
        return "short"
    if parent != (ROOT if name.parent_hash is None else name.parent_hash):
        return "other"
    if tokens != name.tokens:
        return "tokens"
    return None if xxhash.xxh3_64_intdigest(payload) == checksum else "checksum"
