"""What a kvrelay worker and the connector in a vLLM tell each other: where the staging pool is, and which of its blocks
a request's KV is to be saved to, or loaded from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import msgspec

from kvrelay.core.layout import KVLayout
from kvrelay.errors import InvalidInputError

CONFIG_KEY = "kvrelay_staging"
"""The StagingPlace in vLLM's ``kv_connector_extra_config``, if the worker has started vLLM itself."""
PARAMS_KEY = "kvrelay"
"""A request's StagedKv in its ``kv_transfer_params``."""
VERSION = 2


class StagingPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool of ``num_blocks`` blocks of ``layout`` in the file at ``path``, which both processes map.

    For a vLLM that the worker has not started: ``pool`` is the pool's random name, ``tickets`` the file of its
    TicketTable, and ``fingerprint`` the vLLM that its blocks are made for (``vllm_facts.fingerprint``).
    """

    path: str
    num_blocks: int
    layout: KVLayout
    version: int = VERSION
    pool: str = ""
    tickets: str = ""
    fingerprint: str = ""


class StagedKv(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV of a request's first ``num_tokens`` tokens. ``block_ids[i]``: staging block of the tokens from
    ``i * block_size`` on. ``pool`` is the place's. ``ticket``: see TicketTable; 0 if the pool has none."""

    op: Literal["save", "load"]
    block_ids: tuple[int, ...]
    num_tokens: int
    pool: str = ""
    ticket: int = 0


class Pools(Protocol):
    """The staging pools that a connector may use."""

    def place(self, pool: str) -> StagingPlace:
        """Raises InvalidInputError if that is no pool, or one that no longer exists."""


class OnePool:
    """That of the worker which has started this vLLM."""

    def __init__(self, place: StagingPlace) -> None:
        self._place = place

    def place(self, pool: str) -> StagingPlace:
        if pool != self._place.pool:
            raise InvalidInputError(f"there is no staging pool {pool[:50]!r}")
        return self._place


def encode_place(place: StagingPlace) -> dict[str, Any]:
    """For ``kv_connector_extra_config``."""
    return {CONFIG_KEY: msgspec.to_builtins(place)}


def decode_place(extra_config: Mapping[str, Any]) -> StagingPlace:
    """Raises InvalidInputError if another version of kvrelay has written it."""
    try:
        place = msgspec.convert(extra_config.get(CONFIG_KEY), StagingPlace)
    except msgspec.ValidationError as exc:
        raise InvalidInputError(f"kv_connector_extra_config has no usable {CONFIG_KEY}: {exc}") from exc
    if place.version != VERSION:
        raise InvalidInputError(f"the worker speaks version {place.version} to the connector, which has {VERSION}")
    return place


def encode_request(staged: StagedKv) -> bytes:
    """A request's ``kv_transfer_params`` as JSON."""
    return msgspec.json.encode({PARAMS_KEY: staged})


def decode_request(params: Mapping[str, Any] | None, pools: Pools) -> StagedKv | None:
    """None if the request has nothing to do with this connector.

    Raises InvalidInputError unless every block is one of the pool, and none is missing.
    """
    found = None if params is None else params.get(PARAMS_KEY)
    if found is None:
        return None
    try:
        staged = msgspec.convert(found, StagedKv)
    except msgspec.ValidationError as exc:
        raise InvalidInputError(f"kv_transfer_params: {exc}") from exc
    place = pools.place(staged.pool)
    size = place.layout.block_size
    if staged.num_tokens < 1 or len(staged.block_ids) != -(-staged.num_tokens // size):
        raise InvalidInputError(f"{len(staged.block_ids)} staging blocks for {staged.num_tokens} tokens")
    if not all(0 <= block_id < place.num_blocks for block_id in staged.block_ids):
        raise InvalidInputError(f"a staging block beyond the {place.num_blocks} of the pool")
    return staged
