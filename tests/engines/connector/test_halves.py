"""The two halves of the connector: every token's KV is copied once, whole blocks at a time, and nothing foreign is."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.engines.connector.fake_device import DEVICES
from tests.engines.connector.layouts import packed_layout
from tests.engines.vllm.staged import LAYOUT, Paged, VllmRequest, at_once, copy

from kvrelay.core.layout import KVLayout
from kvrelay.engines.connector.scheduler_half import Copies, Copy, SchedulerHalf
from kvrelay.engines.connector.terms import (
    PARAMS_KEY,
    StagingPlace,
    decode_place,
    encode_place,
    latent_region,
    one_rank_layout,
    packed_region,
    state_region,
)
from kvrelay.engines.connector.worker_half import RankPart, WorkerHalf
from kvrelay.errors import ConfigError, InvalidInputError

NUM_STAGED = 12


@contextmanager
def memfd_place(layout: KVLayout, num_blocks: int) -> Iterator[StagingPlace]:
    fd = os.memfd_create("staging")
    os.ftruncate(fd, num_blocks * layout.block_bytes)
    yield decode_place(encode_place(StagingPlace(f"/proc/{os.getpid()}/fd/{fd}", num_blocks, layout)))
    os.close(fd)


@pytest.fixture
def place() -> Iterator[StagingPlace]:
    with memfd_place(LAYOUT, NUM_STAGED) as made:
        yield made


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
    assert half.num_to_load(load, 32) == 17, "the last token is computed in any case"
    half.allocated(load, [[10, 11, 12, 13]], 17)
    (copy,) = half.plan({}, lambda request_id: []).loads
    assert (copy.staged, copy.paged) == ((5, 6), ((12, 13),))
    save = _request("p", [1] * 50, "save", [3, 4, 5, 6], 50)
    half.allocated(save, [[20]], 0)
    save.num_computed_tokens = 32
    (copy,) = half.plan({"p": 18}, lambda request_id: [[20, 21, 22, 23]]).saves
    assert (copy.staged, copy.paged) == ((3, 4, 5, 6), ((20, 21, 22, 23),))


def test_what_does_not_reach_back_to_vllms_own_blocks_is_computed(place: StagingPlace) -> None:
    """Blocks that were not sent have been evicted since. Only the rest has come, so it is of no use."""
    half = _scheduler(place)
    params = {PARAMS_KEY: {"op": "load", "block_ids": [3, 4, 5, 6], "num_tokens": 50, "first_block": 2}}
    request = VllmRequest("d", [1] * 51, params)
    assert half.num_to_load(request, 16) == 0
    assert half.num_to_load(request, 32) == 0, "its staging blocks may be another request's by now"
    half.allocated(request, [[10, 11, 12, 13]], 0)
    assert half.plan({}, lambda request_id: []).loads == ()
    assert half.num_lost == 1
    other = VllmRequest("e", [1] * 51, params)
    assert half.num_to_load(other, 32) == 18


def test_blocks_that_are_not_moved_are_not_saved(place: StagingPlace) -> None:
    half = _scheduler(place)
    params = {PARAMS_KEY: {"op": "save", "block_ids": [3, 4, 5], "num_tokens": 40, "first_block": 1, "ticket": 9}}
    request = VllmRequest("p", [1] * 40, params)
    half.allocated(request, [[10]], 0)
    assert half.plan({"p": 16}, lambda request_id: [[10, 11, 12]]).saves == ()
    request.num_computed_tokens = 16
    (copy,) = half.plan({"p": 24}, lambda request_id: [[10, 11, 12]]).saves
    assert (copy.staged, copy.paged, copy.ticket, copy.num_blocks) == ((4, 5), ((11, 12),), 9, 3)
    assert half.finished("p"), "its blocks are being read"


def test_a_step_is_told_that_it_may_overwrite_what_is_being_saved(place: StagingPlace) -> None:
    half = _scheduler(place)
    half.allocated(_request("p", [1] * 40, "save", [3, 4, 5], 40), [[10]], 0)
    half.plan({"p": 16}, lambda request_id: [[10]])
    assert half.plan({}, lambda request_id: [], {"p"}).frees_blocks
    assert not half.plan({}, lambda request_id: [], {"another"}).frees_blocks


def test_blocks_of_a_request_that_saved_nothing_are_free_at_once(place: StagingPlace) -> None:
    half = _scheduler(place)
    half.allocated(_request("p", [1] * 40, "save", [3, 4, 5], 40), [[10]], 0)
    assert not half.finished("p")
    assert not half.finished("unknown")


def test_a_request_loads_once_although_it_is_preempted(place: StagingPlace) -> None:
    """Its staging blocks may be another request's by then."""
    half = _scheduler(place)
    request = _request("d", [1] * 20, "load", [3, 4], 20)
    half.allocated(request, [[10, 11]], half.num_to_load(request, 0))
    half.allocated(request, [[10, 11]], 0)  # vLLM tells the blocks again when the KV has come
    assert len(half.plan({}, lambda request_id: []).loads) == 1
    assert half.num_to_load(request, 0) == 0
    half.finished("d")
    assert "0 loaded" in repr(half)


def test_a_step_saves_what_it_completes_and_the_last_one_the_rest(place: StagingPlace) -> None:
    half = _scheduler(place)
    request = _request("p", [1] * 40, "save", [3, 4, 5], 40)
    half.allocated(request, [[10]], 0)
    saved = []
    for num_scheduled in (8, 8, 20, 4):
        copies = half.plan({"p": num_scheduled, "other": 1}, lambda request_id: [[10, 11, 12]])
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
        {"op": "load", "block_ids": [1, 2], "num_tokens": 20, "first_block": 2},
        {"op": "load", "block_ids": [1, 2], "num_tokens": 20, "first_block": -1},
        {"op": "move", "block_ids": [1, 2], "num_tokens": 20},
        {"op": "load", "block_ids": [1, 2], "num_tokens": 20, "more": 1},
        ["load"],
    ],
)
def test_parameters_that_name_no_blocks_of_the_pool_move_nothing(place: StagingPlace, wrong: object) -> None:
    half = _scheduler(place)
    request = VllmRequest("d", [1] * 20, {PARAMS_KEY: wrong})
    assert half.num_to_load(request, 0) == 0
    half.allocated(request, [[1, 2]], 0)
    assert half.plan({"d": 20}, lambda request_id: [[1, 2]]).saves == ()


def test_requests_of_other_connectors_are_none_of_ours(place: StagingPlace) -> None:
    for params in (None, {}, {"do_remote_decode": True}):
        assert _scheduler(place).num_to_load(VllmRequest("d", [1] * 20, params), 0) == 0


def test_another_version_of_the_worker_is_refused_at_start() -> None:
    place = StagingPlace("/proc/1/fd/0", 1, LAYOUT, version=99)
    for config in (encode_place(place), {"kvrelay_staging": 5}):
        with pytest.raises(InvalidInputError):
            decode_place(config)


def test_a_vllm_that_no_worker_has_started_is_told_of_the_ways_to_take() -> None:
    with pytest.raises(ConfigError, match=r"--vllm-connector kvrelay.*--upstream-kv-transfer vllm"):
        decode_place({"kvrelay_staging_dir": "/run/user/1000/kvrelay"})


WHOLE = RankPart.of(LAYOUT, LAYOUT.model[0].num_layers, 0, 1)


def test_another_shape_of_kv_is_refused_by_name(place: StagingPlace) -> None:
    good = torch.zeros(4, 1, 16, 8)
    with pytest.raises(ConfigError, match="1 layers, not of 2 in a row"):
        WorkerHalf(place, WHOLE).register({"model.layers.0": good})
    for bad in (torch.zeros(4, 2, 16, 8), torch.zeros(2, 4, 1, 16, 8), good.to(torch.bfloat16)):
        with pytest.raises(ConfigError, match=r"model\.layers\.1 is "):
            WorkerHalf(place, WHOLE).register({"model.layers.0": good, "model.layers.1": bad})
    for name in ("model.layers.2", "model.layers.0.more", "model.norm"):
        with pytest.raises(ConfigError, match=f"KV of {name}: a layer twice, or none of 2"):
            WorkerHalf(place, WHOLE).register({"model.layers.0": good, name: good})


def test_a_pool_that_is_not_there_or_too_small_is_refused(place: StagingPlace) -> None:
    with pytest.raises(ConfigError, match="cannot be mapped"):
        WorkerHalf(StagingPlace("/nonexistent", 1, LAYOUT), WHOLE)
    with pytest.raises(ConfigError, match="smaller than"):
        WorkerHalf(StagingPlace(place.path, NUM_STAGED + 1, LAYOUT), WHOLE)


class Ranks:
    """The worker halves of a vLLM with ``tp`` by ``pp`` ranks. ``kv``: all of it, [layer, block, head]."""

    def __init__(self, place: StagingPlace, tp: int, pp: int, kv: torch.Tensor, device: str) -> None:
        layout = place.layout
        per_stage = layout.model[0].num_layers // pp
        self.halves, self.parts = [], []
        for number in range(tp * pp):
            stage, tp_rank = divmod(number, tp)
            part = RankPart.of(layout, per_stage, tp_rank, tp)
            layers = range(stage * per_stage, (stage + 1) * per_stage)
            heads = slice(part.first_head, part.first_head + part.num_heads)
            caches = {layer: kv[layer][:, heads].clone() for layer in layers}
            half = WorkerHalf(place, part, device=DEVICES[device](), watch=at_once)
            half.register({f"model.layers.{layer}.self_attn.attn": cache for layer, cache in caches.items()})
            self.halves.append(half)
            self.parts.append((caches, heads))

    def copy(self, copies: Copies) -> None:
        for half in self.halves:
            copy(half, copies)

    def differ(self, blocks: list[int], kv: torch.Tensor) -> bool:
        """Whether any rank's ``blocks`` are not those of ``kv``, in this order."""
        return any(
            not torch.equal(cache[blocks], kv[layer][:, heads])
            for caches, heads in self.parts
            for layer, cache in caches.items()
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize(("theirs", "ours"), [*itertools.product([(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)], repeat=2)])
def test_ranks_of_any_number_hand_over_to_ranks_of_any_other(
    num_heads: int, theirs: tuple[int, int], ours: tuple[int, int], device: str
) -> None:
    """One pool stands for both workers': kvrelay copies one to the other whole."""
    layout = packed_layout(num_layers=4, num_heads=num_heads, block_size=4, head_dim=3, dtype="float32")
    with memfd_place(layout, 6) as place:
        kv = torch.rand(4, 8, num_heads, 4, 6)
        prefill = Ranks(place, *theirs, kv, device)
        decode = Ranks(place, *ours, torch.zeros_like(kv), device)
        prefill.copy(Copies(saves=(Copy("p", (4, 5, 0), ((1, 7, 2),)),)))
        decode.copy(Copies(loads=(Copy("d", (4, 5, 0), ((6, 4, 3),)),)))
        assert not decode.differ([6, 4, 3], kv[:, [1, 7, 2]])
        assert [half.take_loaded() for half in decode.halves] == [{"d"}] * len(decode.halves)
        assert prefill.differ([6, 4, 3], kv[:, [1, 7, 2]])


def test_one_rank_saves_what_several_hold(place: StagingPlace) -> None:
    """With one KV head, or a latent: two ranks that wrote the same bytes at once would tear nothing, but twice."""
    assert [RankPart.of(LAYOUT, 2, rank, 4).saves for rank in range(4)] == [True, False, False, False]
    two = packed_layout(2, 2, 16, 4, "float32")
    assert [RankPart.of(two, 2, rank, 4) for rank in range(4)] == [
        RankPart(2, 0, 1, True),
        RankPart(2, 0, 1, False),
        RankPart(2, 1, 1, True),
        RankPart(2, 1, 1, False),
    ]


SPLIT = one_rank_layout(
    4,
    packed_region(num_layers=1, num_heads=2, block_size=4, head_dim=3, dtype="float32"),
    packed_region(num_layers=2, num_heads=2, block_size=4, head_dim=3, dtype="float32", window=5, name="window"),
    state_region(num_layers=1, num_bytes=12),
)
"""Of a model whose layers are: window, state, whole attention, window."""
LAYERS = ((2,), (0, 3), (1,))
GROUPS = {"layers.2.attn": 0, "layers.0.attn": 1, "layers.3.attn": 2, "layers.1.conv": 3}


@contextmanager
def _split_halves(
    device: str,
) -> Iterator[tuple[WorkerHalf, dict[str, torch.Tensor], WorkerHalf, dict[str, torch.Tensor]]]:
    """Prefill and decode: the worker half, and vLLM's KV."""
    fd = os.memfd_create("staging")
    os.ftruncate(fd, 6 * SPLIT.block_bytes)
    place = decode_place(encode_place(StagingPlace(f"/proc/{os.getpid()}/fd/{fd}", 6, SPLIT, layers=LAYERS)))
    found: list[Any] = []
    for _ in range(2):
        half = WorkerHalf(place, RankPart.of(SPLIT, 4, 0, 1), device=DEVICES[device](), watch=at_once)
        caches = {name: torch.rand(9, 2, 4, 6) for name in GROUPS if "attn" in name}
        # vLLM pads the page of a state to that of attention.
        pages = torch.randint(0, 100, (9, 1, 1, 192), dtype=torch.int8)
        half.register(caches | {"layers.1.conv": pages[..., :12]}, GROUPS)
        found += [half, caches | {"layers.1.conv": pages}]
    yield tuple(found)  # type: ignore[misc]
    os.close(fd)


@pytest.mark.parametrize("device", DEVICES)
def test_each_group_of_layers_has_its_blocks_and_what_it_has_no_block_of_is_not_copied(device: str) -> None:
    with _split_halves(device) as (prefill, theirs, decode, ours):
        before = {name: cache.clone() for name, cache in ours.items()}
        # Of three blocks the window needs the last two, and the state is the last.
        saved = ((1, 7, 2), (0, 3, 4), (0, 5, 6), (0, 0, 8))
        loaded = ((4, 6, 3), (0, 1, 2), (0, 5, 7), (0, 0, 8))
        copy(prefill, Copies(saves=(Copy("p", (5, 0, 3), saved),)))
        copy(decode, Copies(loads=(Copy("d", (5, 0, 3), loaded),)))
        for name, group in GROUPS.items():
            size = 12 if name == "layers.1.conv" else None
            for block in range(9):
                source = dict(zip(loaded[group], saved[group])).get(block, 0)
                expected = theirs[name][source] if source else before[name][block]
                assert torch.equal(ours[name][block, ..., :size], expected[..., :size]), (name, block)
            assert torch.equal(ours[name][..., size or 6 :], before[name][..., size or 6 :]), "padding is vLLM's"


@pytest.mark.parametrize("device", DEVICES)
def test_what_no_group_has_a_block_of_leaves_no_bytes_of_others(device: str) -> None:
    with _split_halves(device) as (prefill, theirs, decode, ours):
        copy(prefill, Copies(saves=(Copy("other", (3,), ((1,), (2,), (3,), (4,))),)))
        copy(prefill, Copies(saves=(Copy("p", (3,), ((1,), (0,), (0,), (0,))),)))
        copy(decode, Copies(loads=(Copy("d", (3,), ((5,), (6,), (7,), (8,))),)))
        assert torch.equal(ours["layers.2.attn"][5], theirs["layers.2.attn"][1])
        assert not ours["layers.0.attn"][6].any()
        assert not ours["layers.1.conv"][8, ..., :12].any()


def test_a_state_that_has_seen_the_last_token_is_not_loaded() -> None:
    """Where vLLM samples the first token anew it computes the last one of the prompt again."""
    with memfd_place(SPLIT, 6) as place:
        half = _scheduler(place)
        assert half.num_to_load(_request("d", [1] * 9, "load", [3, 4], 8), 0) == 8
        assert half.num_to_load(_request("e", [1] * 8, "load", [3, 4], 8), 0) == 0


def test_what_ends_with_a_block_is_loaded_without_its_last_token() -> None:
    """vLLM has no block yet for the token that it computes again, if that begins one."""
    with memfd_place(LAYOUT, 6) as place:
        half = _scheduler(place)
        request = _request("d", [1] * 33, "load", [3, 4, 5], 33)
        half.allocated(request, [[10, 11]], half.num_to_load(request, 0))
        (planned,) = half.plan({}, lambda request_id: []).loads
        assert (planned.staged, planned.paged) == ((3, 4), ((10, 11),))


@pytest.mark.parametrize("device", DEVICES)
def test_a_latent_is_a_region_of_its_own(device: str) -> None:
    layout = one_rank_layout(16, latent_region(num_layers=2, values=576, dtype="bfloat16"))
    with memfd_place(layout, 3) as place:
        latents = [torch.rand(4, 16, 576).to(torch.bfloat16) for _ in range(4)]
        prefill, decode = (WorkerHalf(place, WHOLE, device=DEVICES[device](), watch=at_once) for _ in range(2))
        prefill.register({f"model.layers.{layer}.attn": latents[layer] for layer in (0, 1)})
        decode.register({f"model.layers.{layer}.attn": latents[2 + layer] for layer in (0, 1)})
        copy(prefill, Copies(saves=(Copy("p", (2,), ((3,),)),)))
        copy(decode, Copies(loads=(Copy("d", (2,), ((1,),)),)))
        assert all(torch.equal(latents[2 + layer][1], latents[layer][3]) for layer in (0, 1))
