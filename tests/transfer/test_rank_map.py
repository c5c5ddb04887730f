"""The rank map against its published table, and against the parts of the model that ranks hold."""

from __future__ import annotations

import itertools

import pytest
from tests.transfer.exchanging import exchanging_ranks

from kvrelay.config import WorkerRole
from kvrelay.core.layout import paged_kv
from kvrelay.errors import ConfigError
from kvrelay.transfer.rank_map import InstanceSizes, KvRank, place_rank
from kvrelay.transfer.values import TransferOp

P, D = WorkerRole.PREFILL, WorkerRole.DECODE


@pytest.mark.parametrize(
    ("role", "rank", "kv_rank", "group_rank", "world_size", "global_rank", "port_offset"),
    [
        (P, 0, 0, 0, 3, 0, 1),
        (P, 1, 0, 0, 3, 1, 3),
        (D, 0, 1, 1, 3, 2, 1),
        (D, 1, 1, 2, 3, 3, 1),
        (D, 2, 1, 1, 3, 4, 3),
        (D, 3, 1, 2, 3, 5, 3),
    ],
)
def test_the_published_table(
    role: WorkerRole, rank: int, kv_rank: int, group_rank: int, world_size: int, global_rank: int, port_offset: int
) -> None:
    place = place_rank(InstanceSizes(1, tp=2), InstanceSizes(1, tp=4), role, kv_rank, rank)
    assert (place.group_rank, place.world_size, place.global_rank) == (group_rank, world_size, global_rank)
    assert place.port_offset == port_offset


@pytest.mark.parametrize(
    ("ps", "ds", "ptp", "factor"), list(itertools.product([1, 2, 3], [1, 2], [1, 2, 4], [1, 2, 4]))
)
def test_the_published_formulas(ps: int, ds: int, ptp: int, factor: int) -> None:
    dtp = ptp * factor
    prefill, decode = InstanceSizes(ps, tp=ptp), InstanceSizes(ds, tp=dtp)
    for kv_rank, rank in itertools.product(range(ps), range(ptp)):
        place = place_rank(prefill, decode, P, kv_rank, rank)
        assert place == KvRank(rank, kv_rank, ps + ds * factor, kv_rank * ptp + rank)
        assert place.port_offset == 2 * rank + 1
    for kv_rank, rank in itertools.product(range(ps, ps + ds), range(dtp)):
        place = place_rank(prefill, decode, D, kv_rank, rank)
        assert place.group_rank == ps + (kv_rank - ps) * factor + rank % factor
        assert place.global_rank == ps * ptp + (kv_rank - ps) * dtp + rank
        assert place.port_offset == 2 * (rank // factor) + 1


def test_more_prefill_ranks_than_decode_ranks_is_the_mirror_image() -> None:
    prefill, decode = InstanceSizes(1, tp=4), InstanceSizes(1, tp=2)
    places = [place_rank(prefill, decode, P, 0, rank) for rank in range(4)]
    assert [place.group for place in places] == [0, 0, 1, 1]
    assert [place.group_rank for place in places] == [0, 1, 0, 1]
    places = [place_rank(prefill, decode, D, 1, rank) for rank in range(2)]
    assert [(place.group, place.group_rank, place.world_size) for place in places] == [(0, 2, 3), (1, 2, 3)]


SIZES = list(itertools.product([1, 2, 4], repeat=4))


@pytest.mark.parametrize(("ps", "ds"), [(1, 1), (2, 3)])
def test_numbers_are_unique_and_without_gaps(ps: int, ds: int) -> None:
    for ptp, ppp, dtp, dpp in SIZES:
        prefill, decode = InstanceSizes(ps, ptp, ppp), InstanceSizes(ds, dtp, dpp)
        places = [place_rank(prefill, decode, P, i, rank) for i in range(ps) for rank in range(ptp * ppp)]
        places += [place_rank(prefill, decode, D, ps + i, rank) for i in range(ds) for rank in range(dtp * dpp)]
        assert [place.global_rank for place in places] == list(range(len(places)))
        groups: dict[int, list[int]] = {}
        for place in places:
            groups.setdefault(place.group, []).append(place.group_rank)
        assert len(groups) == min(ptp, dtp) * min(ppp, dpp)
        assert all(sorted(ranks) == list(range(places[0].world_size)) for ranks in groups.values())


def test_a_group_holds_exactly_the_ranks_that_exchange_kv() -> None:
    for ptp, ppp, dtp, dpp in SIZES:
        prefill, decode = InstanceSizes(1, ptp, ppp), InstanceSizes(1, dtp, dpp)
        layouts = [paged_kv(4, 4, 16, 1, "bfloat16", tp, pp) for tp, pp in ((ptp, ppp), (dtp, dpp))]
        pairs = exchanging_ranks(*layouts, TransferOp.WRITE)
        same_group = {
            (here, there)
            for here, there in itertools.product(range(ptp * ppp), range(dtp * dpp))
            if place_rank(prefill, decode, P, 0, here).group == place_rank(prefill, decode, D, 1, there).group
        }
        assert pairs == same_group


@pytest.mark.parametrize(
    ("prefill", "decode", "role", "instance", "rank"),
    [
        (InstanceSizes(1, tp=2), InstanceSizes(1, tp=3), P, 0, 0),
        (InstanceSizes(1, pp=2), InstanceSizes(1, pp=3), P, 0, 0),
        (InstanceSizes(1, tp=0), InstanceSizes(1), P, 0, 0),
        (InstanceSizes(1), InstanceSizes(1), P, 1, 0),
        (InstanceSizes(1), InstanceSizes(1), D, 0, 0),
        (InstanceSizes(1), InstanceSizes(1), D, 2, 0),
        (InstanceSizes(1, tp=2), InstanceSizes(1, tp=2), P, 0, 2),
        (InstanceSizes(1), InstanceSizes(1), WorkerRole.BOTH, 0, 0),
    ],
)
def test_impossible_places_are_refused(
    prefill: InstanceSizes, decode: InstanceSizes, role: WorkerRole, instance: int, rank: int
) -> None:
    with pytest.raises(ConfigError):
        place_rank(prefill, decode, role, instance, rank)
