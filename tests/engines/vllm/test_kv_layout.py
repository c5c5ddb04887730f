"""Which layers of a model are of which region, and how large the regions are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvrelay.core.layout import KVLayout
from kvrelay.engines.vllm.kv_layout import kv_layout, layers_by_region, require_states_at_block_ends
from kvrelay.errors import ConfigError


class States:
    """A model class of vLLM's."""

    @staticmethod
    def get_mamba_state_shape_from_config(config: Any) -> tuple[tuple[int, ...], ...]:
        return ((2, 40 // config.parallel_config.tensor_parallel_size),)

    @staticmethod
    def get_mamba_state_dtype_from_config(config: Any) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16,)


def config(
    types: list[str] | None, *, window: int | None = None, mode: str = "align", states: type = States, **changed: Any
) -> Any:
    """What is read of vLLM's."""
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(layer_types=types),
        get_total_num_hidden_layers=lambda: 4,
        get_head_size=lambda: 8,
        get_total_num_kv_heads=lambda: 2,
        get_sliding_window=lambda: window,
        dtype=torch.float32,
        use_mla=False,
        is_hybrid=types is not None and not {"conv", "hybrid"}.isdisjoint(types),
        architecture="Some",
        registry=SimpleNamespace(resolve_model_cls=lambda architecture, model_config: (states, architecture)),
    )
    return SimpleNamespace(
        model_config=SimpleNamespace(**vars(model) | changed),
        cache_config=SimpleNamespace(block_size=32, cache_dtype="auto", mamba_cache_mode=mode),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, world_size=1),
        speculative_config=None,
    )


def sizes(layout: KVLayout) -> dict[str, tuple[int, int, int]]:
    """By region: layers, window, bytes of a block."""
    parts = [sum(part.num_bytes for part in layout.parts(number)) for number in range(len(layout.regions))]
    return {region.name: (region.num_layers, region.window, size) for region, size in zip(layout.model, parts)}


WHOLE = 32 * 2 * 2 * 8 * 4
"""Bytes of a block of one layer: tokens, heads, K and V, values, float32."""


@pytest.mark.parametrize(
    ("types", "window", "layers", "expected"),
    [
        (None, None, {"kv": (0, 1, 2, 3)}, {"kv": (4, 0, 4 * WHOLE)}),
        (None, 64, {"kv": (0, 1, 2, 3)}, {"kv": (4, 64, 4 * WHOLE)}),
        (["sliding_attention"] * 4, 64, {"kv": (0, 1, 2, 3)}, {"kv": (4, 64, 4 * WHOLE)}),
        (
            ["sliding_attention", "full_attention"] * 2,
            64,
            {"kv": (1, 3), "window": (0, 2)},
            {"kv": (2, 0, 2 * WHOLE), "window": (2, 64, 2 * WHOLE)},
        ),
        (
            ["conv", "conv", "full_attention", "conv"],
            None,
            {"kv": (2,), "state": (0, 1, 3)},
            {"kv": (1, 0, WHOLE), "state": (3, 0, 3 * 2 * 40 * 2)},
        ),
    ],
    ids=["whole", "window", "windows", "interleaved", "states"],
)
def test_layers_of_a_kind_are_a_region(
    types: list[str] | None, window: int | None, layers: dict[str, tuple[int, ...]], expected: dict[str, Any]
) -> None:
    given = config(types, window=window)
    assert layers_by_region(given) == layers
    layout = kv_layout(given)
    assert sizes(layout) == expected
    assert list(layers) == list(layout.region_names)
    assert layout.flaw is None
    require_states_at_block_ends(given, layout)


def test_what_moves_is_what_the_decode_worker_needs() -> None:
    """A window of 64 tokens lies in up to three blocks of 32. A state is there once."""
    windows = kv_layout(config(["sliding_attention", "full_attention"] * 2, window=64))
    assert [windows.bytes_after(tokens) for tokens in (32, 96, 320)] == [4 * WHOLE, 12 * WHOLE, (20 + 6) * WHOLE]
    states = kv_layout(config(["conv", "conv", "full_attention", "conv"]))
    assert [states.bytes_after(tokens) for tokens in (32, 320)] == [WHOLE + 480, 10 * WHOLE + 480]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"mode": "none"}, "leave out --no-enable-prefix-caching, or use nixl"),
        ({"tp": 2}, "of one rank only"),
        ({"heads": 1, "head_size": 1}, "320 bytes, so vLLM's blocks must have 64 tokens or more: set --block-size 64"),
    ],
)
def test_states_that_are_not_at_the_ends_of_blocks_are_refused(changed: dict[str, Any], reason: str) -> None:
    given = config(["conv", "conv", "full_attention", "conv"], mode=changed.get("mode", "align"))
    given.parallel_config = SimpleNamespace(tensor_parallel_size=changed.get("tp", 1), world_size=changed.get("tp", 1))
    if "heads" in changed:
        given.model_config.get_total_num_kv_heads = lambda: 1
        given.model_config.get_head_size = lambda: 1
        given.model_config.registry.resolve_model_cls = lambda architecture, model_config: (Larger, architecture)
    with pytest.raises(ConfigError, match=reason):
        require_states_at_block_ends(given, kv_layout(given))


class Larger(States):
    @staticmethod
    def get_mamba_state_dtype_from_config(config: Any) -> tuple[torch.dtype, ...]:
        return (torch.float32,)


def test_a_state_is_that_of_all_ranks() -> None:
    given = config(["conv", "conv", "full_attention", "conv"])
    given.parallel_config.tensor_parallel_size = 2
    assert sizes(kv_layout(given))["state"] == (3, 0, 3 * 2 * 40 * 2)


def test_recurrent_layers_that_are_not_known_are_refused() -> None:
    with pytest.raises(ConfigError, match="does not know which layers of this model are recurrent: use nixl"):
        kv_layout(config(None, is_hybrid=True))
    with pytest.raises(ConfigError, match="does not know the recurrent states of Some: use nixl"):
        kv_layout(config(["conv"] * 4, states=object))
