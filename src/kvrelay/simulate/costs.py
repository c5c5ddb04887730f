"""What a machine costs in seconds: the figures from which the models of the simulator are built.

They are fitted from live workers or written by hand, and travel as one JSON object with the machine and model named.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from kvrelay.config.files import read_file
from kvrelay.core.decoding import UNREADABLE
from kvrelay.core.step_cost import MAX_COST_S, StepCost
from kvrelay.errors import ConfigError
from kvrelay.simulate.shipped import SHIPPED, shipped_names

MAX_COUNT = 100_000_000
"""The simulator keeps an entry for each block."""


class Costs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds unless the name says otherwise. The defaults are a GPU of the middle class with a model of some billion
    parameters, like ``StepCost``'s.

    ``spread``: standard deviation of the logarithm of a step's time; ``prefill_spread``: of a step with a prefill, 0
    for the same. ``between_steps_s``: from a step's end to the next one's begin. ``hop_s``: one way on the request
    plane. ``queue_hop_s``: from a push to the pull. A transfer of n tokens takes
    ``transfer_overhead_s + n * token_bytes / link_bytes_per_s``, once the links of both workers are free.
    ``kv_tokens``: what the KV pool of a worker holds. ``host_bytes_per_s`` and ``disk_bytes_per_s``: copies of its KV
    tiers, either way. A frontend takes ``frontend_request_s`` for each request and
    ``frontend_token_s`` for each token. ``start_s``: from the launch of a worker to its registration. ``drain_s``: what
    a drain or a change of role takes after the last work has ended.
    """

    step: StepCost = StepCost()
    spread: float = 0.0
    prefill_spread: float = 0.0
    between_steps_s: float = 0.0002
    hop_s: float = 0.0003
    queue_hop_s: float = 0.001
    transfer_overhead_s: float = 0.0005
    link_bytes_per_s: float = 25e9
    token_bytes: int = 131072
    kv_tokens: int = 262144
    host_bytes_per_s: float = 20e9
    disk_bytes_per_s: float = 3e9
    frontend_request_s: float = 0.0003
    frontend_token_s: float = 0.00001
    start_s: float = 30.0
    drain_s: float = 0.1
    machine: str = ""
    model: str = ""
    version: int = 1

    def num_blocks(self, block_size: int, given: int = 0) -> int:
        """Blocks of a worker's KV pool; ``given``: by a setting, 0: none."""
        return given or max(self.kv_tokens // block_size, 1)


def decode_costs(data: bytes, source: str) -> Costs:
    """Costs from JSON. ``source`` names them in errors. Raises ConfigError, which says what is wrong, in one line."""
    try:
        costs = msgspec.json.decode(data, type=Costs)
        given = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        step = msgspec.json.decode(given.get("step", msgspec.Raw(b"{}")), type=dict[str, float])
    except UNREADABLE as exc:
        raise ConfigError(f"costs {source}: {exc}", param="costs") from exc
    if unknown := sorted(set(step) - set(StepCost.__struct_fields__)):
        raise ConfigError(f"costs {source}: `$.step` has the unknown field `{unknown[0]}`", param="costs")
    if costs.version != 1:
        raise ConfigError(f"costs {source}: version {costs.version} is unknown; this release reads 1", param="costs")
    check_costs(costs, source)
    return costs


def read_costs(path: Path) -> Costs:
    """Costs from a file. Raises ConfigError."""
    try:
        return decode_costs(read_file(path), str(path))
    except OSError as exc:
        raise ConfigError(f"costs {path}: {exc.strerror}", param="costs") from exc


def costs_of(name: str) -> Costs:
    """Those that ship under this name, or those of the file. Raises ConfigError, which says what there is."""
    if name in (known := shipped_names()):
        return decode_costs((SHIPPED / f"{name}.json").read_bytes(), name)
    if not Path(name).exists() and "/" not in name and not name.endswith(".json"):
        raise ConfigError(f"--costs {name}: neither a file nor one of {', '.join(known)}", param="costs")
    return read_costs(Path(name))


def encode_costs(costs: Costs) -> bytes:
    """The JSON that ``decode_costs`` reads, indented for people."""
    return msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n"


def check_costs(costs: Costs, source: str) -> None:
    """Raise ConfigError for a figure that cannot be a time, a rate or a size."""
    if not costs.step.is_sound:
        raise ConfigError(
            f"costs {source}: `$.step` must hold times of 0 s or more, together at most an hour, and not all 0",
            param="costs",
        )
    for name in costs.__struct_fields__:
        value = getattr(costs, name)
        if isinstance(value, int | float) and not 0.0 <= value < math.inf:
            raise ConfigError(f"costs {source}: `$.{name}` must be 0 or more, got {value}", param="costs")
        if name.endswith("bytes_per_s"):
            if value <= 0.0:
                raise ConfigError(f"costs {source}: `$.{name}` must be above 0", param="costs")
        elif name.endswith("_s") and value > MAX_COST_S:
            raise ConfigError(f"costs {source}: `$.{name}` must be at most an hour, got {value:g} s", param="costs")
        elif name in ("kv_tokens", "token_bytes") and value > MAX_COUNT:
            raise ConfigError(f"costs {source}: `$.{name}` must be at most {MAX_COUNT:,}", param="costs")
    if max(costs.spread, costs.prefill_spread) > 2.0:
        raise ConfigError(f"costs {source}: spreads must be at most 2", param="costs")
