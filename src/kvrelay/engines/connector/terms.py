"""What a kvrelay worker and the connector in a vLLM tell each other: where the staging pool is, which of its blocks a
request's KV is to be saved to, or loaded from; and, from each rank, which copies are complete."""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from kvrelay.core.layout import KV, KVLayout, KVRegion, RegionCut
from kvrelay.errors import ConfigError, InvalidInputError

CONFIG_KEY = "kvrelay_staging"
"""The StagingPlace in vLLM's ``kv_connector_extra_config``."""
PARAMS_KEY = "kvrelay"
"""A request's StagedKv in its ``kv_transfer_params``."""
VERSION = 6
_REPORT = struct.Struct("<qHHIqdd")
REPORT_BYTES = _REPORT.size
"""A multiple of these is written to a pipe, and read from it, at once."""


class StagingPlace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A pool of ``num_blocks`` blocks of ``layout`` in the file at ``path``, which both processes map. ``layers``: of
    each region, the numbers of its layers in the model, ascending; empty: all layers are those of one region.
    ``reports``: the pipe for reports of complete copies; empty: no one reads them."""

    path: str
    num_blocks: int
    layout: KVLayout
    version: int = VERSION
    layers: tuple[tuple[int, ...], ...] = ()
    reports: str = ""

    @property
    def places(self) -> dict[int, tuple[int, int]]:
        """By number of a layer in the model: its region, and its place among the region's layers."""
        layers = self.layers or (range(self.layout.model[0].num_layers),)
        return {layer: (region, place) for region, some in enumerate(layers) for place, layer in enumerate(some)}


def one_rank_layout(block_size: int, *regions: KVRegion) -> KVLayout:
    return KVLayout(block_size, tuple(RegionCut(region, (region.num_layers,)) for region in regions))


def packed_region(
    num_layers: int, num_heads: int, block_size: int, head_dim: int, dtype: str, window: int = 0, name: str = KV
) -> KVRegion:
    """K and V in the order of vLLM's attention, which may pack the keys of all tokens of a block: a block is one entry
    per head."""
    values = 2 * head_dim * block_size
    return KVRegion(name, num_layers, num_heads, values, dtype, num_vectors=1, entry_tokens=block_size, window=window)


def latent_region(num_layers: int, values: int, dtype: str) -> KVRegion:
    """Latents (MLA): one of so many ``values`` per layer and token."""
    return KVRegion("latent", num_layers, 1, values, dtype, num_vectors=1)


def state_region(num_layers: int, num_bytes: int) -> KVRegion:
    """What so many recurrent layers know at the end of a block, in an order of bytes that only vLLM knows."""
    return KVRegion("state", num_layers, 1, num_bytes, "uint8", num_vectors=1, entry_tokens=0)


class StagedKv(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV of a request's first ``num_tokens`` tokens. ``block_ids[i]``: staging block of the tokens from
    ``i * block_size`` on. The first ``first_block`` blocks are not moved: the decode worker's vLLM has them. Reports
    name the request by ``ticket``."""

    op: Literal["save", "load"]
    block_ids: tuple[int, ...]
    num_tokens: int
    first_block: int = 0
    ticket: int = 0


class CopyKind(enum.IntEnum):
    """Which way a copy goes."""

    SAVE = 1
    """From vLLM to the staging pool."""
    LOAD = 2


class Report(NamedTuple):
    """A rank's copies for the request of ``ticket`` are complete: those of its first ``num_blocks`` blocks. The last
    ones were ``num_bytes``, submitted at ``began_s`` and seen complete at ``ended_s`` (this host's monotonic clock)."""

    ticket: int
    rank: int
    kind: CopyKind
    num_blocks: int
    num_bytes: int
    began_s: float
    ended_s: float


def encode_report(report: Report) -> bytes:
    return _REPORT.pack(*report)


def decode_reports(data: bytes) -> Iterator[Report]:
    """Of whole reports."""
    for ticket, rank, kind, *rest in _REPORT.iter_unpack(data):
        yield Report(ticket, rank, CopyKind(kind), *rest)


def encode_place(place: StagingPlace) -> dict[str, Any]:
    """For ``kv_connector_extra_config``."""
    return {CONFIG_KEY: msgspec.to_builtins(place)}


def decode_place(extra_config: Mapping[str, Any]) -> StagingPlace:
    """Raises ConfigError if it is not there, because the worker has not started this vLLM; InvalidInputError if another
    version of kvrelay has written it."""
    if CONFIG_KEY not in extra_config:
        raise ConfigError(
            "kvrelay's connector works in a vLLM that a worker has started (--engine vllm --vllm-connector kvrelay); "
            "servers that run by themselves need vLLM's NixlConnector (and workers with --upstream-kv-transfer vllm)"
        )
    try:
        place = msgspec.convert(extra_config[CONFIG_KEY], StagingPlace)
    except msgspec.ValidationError as exc:
        raise InvalidInputError(f"kv_connector_extra_config has no usable {CONFIG_KEY}: {exc}") from exc
    if place.version != VERSION:
        raise InvalidInputError(f"the worker speaks version {place.version} to the connector, which has {VERSION}")
    return place


def encode_request(staged: StagedKv) -> bytes:
    """A request's ``kv_transfer_params`` as JSON."""
    return msgspec.json.encode({PARAMS_KEY: staged})


def decode_request(params: Mapping[str, Any] | None, place: StagingPlace) -> StagedKv | None:
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
    size = place.layout.block_size
    if staged.num_tokens < 1 or len(staged.block_ids) != -(-staged.num_tokens // size):
        raise InvalidInputError(f"{len(staged.block_ids)} staging blocks for {staged.num_tokens} tokens")
    if not 0 <= staged.first_block < len(staged.block_ids):
        raise InvalidInputError(f"{staged.first_block} of {len(staged.block_ids)} staging blocks are not moved")
    if not all(0 <= block_id < place.num_blocks for block_id in staged.block_ids):
        raise InvalidInputError(f"a staging block beyond the {place.num_blocks} of the pool")
    return staged
