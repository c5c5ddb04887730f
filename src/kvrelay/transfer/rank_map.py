"""The rank map: which ranks of prefill and decode instances form a group, by number alone. Pure.

Peer-to-peer transports connect the ranks of a group, and find each other by these numbers: every instance computes them
from its own place and the sizes of both kinds, without asking anyone. Prefill instances are numbered first.

    P: tp 2     rank 0        rank 1             a group holds the ranks whose layers and heads overlap;
                /    \\        /    \\            equal sizes pair equal ranks
    D: tp 4  rank 0 rank 1  rank 2 rank 3        group 0 = {P0, D0, D1}, group 1 = {P1, D2, D3}

With PS and DS instances, ``tp_p`` and ``tp_d`` their tensor-parallel degrees, and ``tpm`` the larger over the smaller
(the usual form has tp_p <= tp_d and no stages):

    kv_world_size     PS + DS * tpm                              the size of each group
    kv_group_rank     P: kv_rank                                 D: PS + (kv_rank - PS) * tpm + rank % tpm
    kv_global_rank    P: kv_rank * tp_p + rank                   D: PS * tp_p + (kv_rank - PS) * tp_d + rank
    port offset       P: 2 * rank + 1                            D: 2 * (rank // tpm) + 1

If tp_p > tp_d the two sides change places: P then counts ``tpm`` ranks per instance in a group. Pipeline stages
multiply in the same way: a rank's number is ``stage * tp + tp_rank``, and a group is a pair of overlapping parts of
layers and heads.
"""

from __future__ import annotations

import msgspec

from kvrelay.config import WorkerRole
from kvrelay.errors import ConfigError


class InstanceSizes(msgspec.Struct, frozen=True):
    """How many instances of a kind there are, and the tensor- and pipeline-parallel degrees of each."""

    num_instances: int
    tp: int = 1
    pp: int = 1

    @property
    def num_ranks(self) -> int:
        """Of one instance."""
        return self.tp * self.pp


class KvRank(msgspec.Struct, frozen=True):
    """One rank's place. ``group`` numbers the groups, ``group_rank`` the ranks within a group of ``world_size``."""

    group: int
    group_rank: int
    world_size: int
    global_rank: int

    @property
    def port_offset(self) -> int:
        """From an instance's base port: each group has a port of its own, and one for its control."""
        return 2 * self.group + 1


def place_rank(prefill: InstanceSizes, decode: InstanceSizes, role: WorkerRole, instance: int, rank: int) -> KvRank:
    """The place of rank ``rank`` of instance ``instance`` (the "kv_rank"; decode instances count on from prefill's).

    Raises ConfigError for degrees of which neither divides the other, and for numbers that do not exist.
    """
    for name, here, there in (("tp", prefill.tp, decode.tp), ("pp", prefill.pp, decode.pp)):
        if min(here, there) < 1 or (here % there and there % here):
            raise ConfigError(f"{name} {here} (prefill) and {there} (decode): one must divide the other", param=name)
    is_prefill = role is WorkerRole.PREFILL
    own = prefill if is_prefill else decode
    number = instance if is_prefill else instance - prefill.num_instances
    if role is WorkerRole.BOTH or not 0 <= number < own.num_instances or not 0 <= rank < own.num_ranks:
        raise ConfigError(f"there is no rank {rank} of {role} instance {instance}", param="rank")
    tp_groups, pp_groups = min(prefill.tp, decode.tp), min(prefill.pp, decode.pp)
    members = {sizes: sizes.num_ranks // (tp_groups * pp_groups) for sizes in (prefill, decode)}
    stage, tp_rank = divmod(rank, own.tp)
    stages, tp_ranks = own.pp // pp_groups, own.tp // tp_groups
    within = stage % stages * tp_ranks + tp_rank % tp_ranks
    prefill_members = prefill.num_instances * members[prefill]
    prefill_ranks = prefill.num_instances * prefill.num_ranks
    return KvRank(
        group=stage // stages * tp_groups + tp_rank // tp_ranks,
        group_rank=(0 if is_prefill else prefill_members) + number * members[own] + within,
        world_size=prefill_members + decode.num_instances * members[decode],
        global_rank=(0 if is_prefill else prefill_ranks) + number * own.num_ranks + rank,
    )
