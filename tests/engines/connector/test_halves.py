"""The two halves of the connector: every token's KV is copied once, whole blocks at a time, and nothing foreign is."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import pytest
import torch
from tests.engines.vllm.staged import LAYOUT, Paged, VllmRequest

from kvrelay.config import UpstreamConfig, load_settings
from kvrelay.engines.connector.scheduler_half import SchedulerHalf
from kvrelay.engines.connector.terms import PARAMS_KEY, StagingPlace, decode_place, encode_place
from kvrelay.engines.connector.worker_half import WorkerHalf
from kvrelay.errors import ConfigError, InvalidInputError

NUM_STAGED = 12


@pytest.fixture
def place() -> Iterator[StagingPlace]:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, NUM_STAGED * LAYOUT.block_bytes)
    yield decode_place(encode_place(StagingPlace(f"/proc/{os.getpid()}/fd/{fd}", NUM_STAGED, LAYOUT)))
    os.close(fd)


def _scheduler(place: StagingPlace) -> SchedulerHalf:
    return SchedulerHalf(place)


def _request(name: str, tokens: list[int], op: str, staged: list[int], num_tokens: int) -> VllmRequest:
    return VllmRequest(name, tokens, {PARAMS_KEY: {"op": op, "block_ids": staged, "num_tokens": num_tokens}})


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 24, 48, 50])
def test_what_one_saves_the_other_loads(place: StagingPlace, num_tokens: int) -> None:
    tokens = list(range(100, 100 + num_tokens))
    staged = [7, 2, 9, 0][: -(-num_tokens // 16)]
    prefill, decode = Paged(place), Paged(place, num_blocks=20)
    prefill.run(_request("p", tokens, "save", staged, num_tokens), prefill.take(num_tokens))
    blocks = decode.take(num_tokens + 1)
    # The decode worker goes on after the first token.
    assert decode.run(_request("d", [*tokens, 5], "load", staged, num_tokens), blocks) == num_tokens
    decode.require(blocks, [*tokens, 5], num_tokens + 1)


def test_what_vllm_has_in_its_own_cache_is_not_loaded_but_is_saved(place: StagingPlace) -> None:
    half = _scheduler(place)
    load = _request("d", [1] * 50, "load", [3, 4, 5, 6], 50)
    assert half.num_to_load(load, 32) == 18
    half.allocated(load, [10, 11, 12, 13], 18)
    (copy,) = half.plan({}, lambda request_id: []).loads
    assert (copy.staged, copy.paged) == ((5, 6), (12, 13))
    save = _request("p", [1] * 50, "save", [3, 4, 5, 6], 50)
    half.allocated(save, [20], 0)
    save.num_computed_tokens = 32
    (copy,) = half.plan({"p": 18}, lambda request_id: [20, 21, 22, 23]).saves
    assert (copy.staged, copy.paged) == ((3, 4, 5, 6), (20, 21, 22, 23))


def test_a_request_loads_once_although_it_is_preempted(place: StagingPlace) -> None:
    """Its staging blocks may be another request's by then."""
    half = _scheduler(place)
    request = _request("d", [1] * 20, "load", [3, 4], 20)
    half.allocated(request, [10, 11], half.num_to_load(request, 0))
    half.allocated(request, [10, 11], 0)  # vLLM tells the blocks again when the KV has come
    assert len(half.plan({}, lambda request_id: []).loads) == 1
    assert half.num_to_load(request, 0) == 0
    half.finished("d")
    assert "0 loaded" in repr(half)


def test_a_step_saves_what_it_completes_and_the_last_one_the_rest(place: StagingPlace) -> None:
    half = _scheduler(place)
    request = _request("p", [1] * 40, "save", [3, 4, 5], 40)
    half.allocated(request, [10], 0)
    saved = []
    for num_scheduled in (8, 8, 20, 4):
        copies = half.plan({"p": num_scheduled, "other": 1}, lambda request_id: [10, 11, 12])
        saved.append([copy.staged for copy in copies.saves])
        request.num_computed_tokens += num_scheduled
    assert saved == [[], [(3,)], [(4,)], [(5,)]]
    half.finished("p")
    assert half.plan({"p": 1}, lambda request_id: []).saves == ()


@pytest.mark.parametrize(
    "wrong",
    [
        {"op": "load", "block_ids": [1, 12], "num_tokens": 20},
        {"op": "load", "block_ids": [-1, 1], "num_tokens": 20},
        {"op": "load", "block_ids": [1], "num_tokens": 20},
        {"op": "load", "block_ids": [], "num_tokens": 0},
        {"op": "move", "block_ids": [1, 2], "num_tokens": 20},
        {"op": "load", "block_ids": [1, 2], "num_tokens": 20, "more": 1},
        ["load"],
    ],
)
def test_parameters_that_name_no_blocks_of_the_pool_move_nothing(place: StagingPlace, wrong: object) -> None:
    half = _scheduler(place)
    request = VllmRequest("d", [1] * 20, {PARAMS_KEY: wrong})
    assert half.num_to_load(request, 0) == 0
    half.allocated(request, [1, 2], 0)
    assert half.plan({"d": 20}, lambda request_id: [1, 2]).saves == ()


def test_requests_of_other_connectors_are_none_of_ours(place: StagingPlace) -> None:
    for params in (None, {}, {"do_remote_decode": True}):
        assert _scheduler(place).num_to_load(VllmRequest("d", [1] * 20, params), 0) == 0


def test_another_version_of_the_worker_is_refused_at_start() -> None:
    place = StagingPlace("/proc/1/fd/0", 1, LAYOUT, version=99)
    for config in (encode_place(place), {"kvrelay_staging": 5}):
        with pytest.raises(InvalidInputError):
            decode_place(config)


def test_a_vllm_that_no_worker_has_started_is_told_of_the_ways_to_take() -> None:
    ways = "--vllm-connector kvrelay or nixl.*--upstream-kv-transfer vllm"
    with pytest.raises(ConfigError, match=ways):
        decode_place({"kvrelay_staging_dir": "/run/user/1000/kvrelay"})
    with pytest.raises(ConfigError, match=ways):
        importlib.import_module("kvrelay.connectors.vllm")


@pytest.mark.parametrize(
    "removed", [{"upstream_staging": "/run/user/1000/kvrelay"}, {"upstream_kv_transfer": "kvrelay"}]
)
def test_the_settings_of_the_removed_connector_name_the_ways_to_take(removed: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"--vllm-connector kvrelay or nixl.*--upstream-kv-transfer vllm"):
        load_settings(UpstreamConfig, file_values={"upstream": "http://127.0.0.1:9", **removed})


def test_another_shape_of_kv_is_refused_by_name(place: StagingPlace) -> None:
    half = WorkerHalf(place)
    good = torch.zeros(4, 1, 16, 8)
    with pytest.raises(ConfigError, match="1 layers, not of 2"):
        half.register({"model.layers.0": good})
    for bad in (torch.zeros(4, 2, 16, 8), torch.zeros(2, 4, 1, 16, 8), good.to(torch.bfloat16)):
        with pytest.raises(ConfigError, match=r"model\.layers\.1 is "):
            half.register({"model.layers.0": good, "model.layers.1": bad})


def test_a_pool_that_is_not_there_or_too_small_is_refused(place: StagingPlace) -> None:
    with pytest.raises(ConfigError, match="cannot be mapped"):
        WorkerHalf(StagingPlace("/nonexistent", 1, LAYOUT))
    with pytest.raises(ConfigError, match="smaller than"):
        WorkerHalf(StagingPlace(place.path, NUM_STAGED + 1, LAYOUT))


def test_layers_are_in_order_of_their_numbers(place: StagingPlace) -> None:
    half = WorkerHalf(place)
    caches = {f"model.layers.{layer}.attn": torch.full((4, 1, 16, 8), float(layer)) for layer in (10, 9)}
    half.register(caches)
    assert [float(cache[0, 0, 0, 0]) for cache in half.caches] == [9.0, 10.0]
