"""What makes a runner one rank of several: its connection to the others, and its memory from the driver.

``executors.torch.build`` calls it while it builds the runner, and it knows nothing of the builder.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.core.layout import KVLayout
from kvrelay.dp.addresses import GroupAddress
from kvrelay.executors.torch.config import ModelFacts
from kvrelay.executors.torch.kv_pool import KvPool, auto_pool_bytes, decide_num_blocks
from kvrelay.executors.torch.parallel.channel import StepMemory
from kvrelay.executors.torch.parallel.collectives import Groups, file_store, group_store
from kvrelay.executors.torch.parallel.experts import ExpertGroup, ExpertSeat
from kvrelay.executors.torch.parallel.messages import AllocatePool, Command, Start, WeightsLoaded
from kvrelay.executors.torch.parallel.rank import ParallelRank
from kvrelay.executors.torch.parallel.rank_progress import RankProgress
from kvrelay.transfer.ranks.channel import Channel, ChannelClosedError

DEFAULT_COLLECTIVE_TIMEOUT_S = 300.0
"""Long, because the driver notices a hang much earlier, unless the driver itself is stopped."""


class RankShard:
    """Connects this rank to the others and gets its memory: turns a runner into one rank of several."""

    def __init__(self, start: Start, commands: Channel[Command], memory: StepMemory, pool_fd: int) -> None:
        self.rank = ParallelRank.numbered(start.index, start.runner.tp, start.runner.pp)
        self.progress = RankProgress(memory.progress[start.index])
        self.groups: Groups | None = None
        # All ranks that share experts run equally many passes a step, whatever their own batches are.
        self.max_micro_batches = 1 if start.group.ep else self.rank.pp_size
        self.block_factor, self.block_offset = 1, 0
        """Converts the worker's block ids to those of ``allocate``'s pool."""
        self._start = start
        self._commands = commands
        self._pool_fd = pool_fd
        self._own_pool: KvPool | None = None
        self._shown = np.zeros((0, self.rank.num_ranks, 0), dtype=np.uint8)
        """The joined pool's memory, which has nothing but blocks that the driver asks for if pools are not joined."""

    def join(self, device: torch.device) -> tuple[Groups, ExpertGroup | None]:
        """The rank's collectives, and those of experts that are spread over more ranks. Raises PeerLostError."""
        store = file_store(self._start.store, self.rank.num_ranks)
        timeout_s = self._start.engine.step_timeout_s or DEFAULT_COLLECTIVE_TIMEOUT_S
        self.groups = Groups(self.rank, store, device, timeout_s, self.progress)
        self.groups.connect()
        experts = self._join_experts(self.groups, store, timeout_s) if self._start.group.ep else None
        return self.groups, experts

    def _join_experts(self, groups: Groups, own_store: Any, timeout_s: float) -> ExpertGroup:
        group = self._start.group
        seat = ExpertSeat.of(self.rank, group)
        store, host = own_store, "127.0.0.1"
        if group.dp > 1:
            address = GroupAddress.parse(group.dp_address)
            if address.directory is not None:
                store = file_store(str(address.directory / "experts"), seat.size * self.rank.pp_size)
            else:
                is_host = seat.index == 0 and self.rank.is_first_stage
                store = group_store(address, is_host=is_host, timeout_s=timeout_s)
                host = address.own_host()
        experts = ExpertGroup(seat, groups, store, timeout_s, host)
        experts.connect()
        return experts

    def allocate(self, facts: ModelFacts, layout: KVLayout, device: torch.device, dtype: torch.dtype) -> KvPool:
        """The rank's pool, with as many blocks as fit into the memory of every rank. Raises ConfigError."""
        self._commands.send(WeightsLoaded(layout, self._max_blocks(layout, device), device.type, facts))
        command = self._commands.receive()
        if not isinstance(command, AllocatePool):
            raise ChannelClosedError("stopped while loading")
        num_ranks = self.rank.num_ranks
        num_blocks = command.num_blocks * num_ranks
        joined = mmap.mmap(self._pool_fd, num_blocks * layout.block_bytes)
        if not command.is_joined:
            self._shown = np.frombuffer(joined, dtype=np.uint8).reshape(command.num_blocks, num_ranks, -1)
            self._own_pool = KvPool(layout, command.num_blocks, device, dtype)
            return self._own_pool
        self.block_factor, self.block_offset = num_ranks, self.rank.index
        return KvPool(layout, num_blocks, device, dtype, memory=joined)

    def show(self, block_ids: Sequence[int]) -> None:
        """Copy this rank's parts of blocks from its own pool to where the driver can read them."""
        assert self._own_pool is not None
        for block_id in block_ids:
            self._shown[block_id, self.rank.index] = self._own_pool.block(block_id)

    def _max_blocks(self, layout: KVLayout, device: torch.device) -> int:
        engine, num_ranks = self._start.engine, self.rank.num_ranks
        given = engine.kv_cache_memory
        share = given if given == "auto" else str(parse_bytes(given) // num_ranks)
        num_sharing = num_ranks if device.type == "cpu" else 1
        return decide_num_blocks(layout, engine.num_blocks, share, lambda: auto_pool_bytes(device) // num_sharing)
