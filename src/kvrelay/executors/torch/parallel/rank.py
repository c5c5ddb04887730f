"""Which part of the model a process holds: its rank in the tensor- and pipeline-parallel groups.

Tensor parallelism (TP) cuts every matrix: heads and feed-forward columns by output, the products that follow by input
(Megatron-LM, Shoeybi et al. 2019). Pipeline parallelism (PP) gives each stage consecutive whole layers. A rank's number
is ``pp_rank * tp_size + tp_rank``. The rank is passed by constructor; there is no global state, so two engines can run
in one process.
"""

from __future__ import annotations

import msgspec

from kvrelay.config.settings import GroupConfig
from kvrelay.errors import ConfigError
from kvrelay.executors.torch.config import ModelConfig


class ParallelRank(msgspec.Struct, frozen=True):
    """Rank and size of the tensor- and pipeline-parallel groups, and the parts that follow from them."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __str__(self) -> str:
        return f"rank {self.index} (tp {self.tp_rank} of {self.tp_size}, pp {self.pp_rank} of {self.pp_size})"

    @classmethod
    def numbered(cls, index: int, tp_size: int, pp_size: int) -> ParallelRank:
        return cls(index % tp_size, tp_size, index // tp_size, pp_size)

    @property
    def index(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def samples(self) -> bool:
        """Whether this rank samples: the first rank of the last stage does."""
        return self.is_last_stage and self.tp_rank == 0

    def layers(self, num_layers: int) -> range:
        """The layers of this stage."""
        count = num_layers // self.pp_size
        return range(self.pp_rank * count, (self.pp_rank + 1) * count)

    def share(self, count: int) -> slice:
        """This rank's part of ``count`` outputs or inputs that TP cuts."""
        size = count // self.tp_size
        return slice(self.tp_rank * size, (self.tp_rank + 1) * size)

    def kv_heads(self, num_kv_heads: int) -> slice:
        """This rank's KV heads. If there are fewer heads than ranks, neighbours hold the same one."""
        if self.tp_size <= num_kv_heads:
            return self.share(num_kv_heads)
        head = self.tp_rank * num_kv_heads // self.tp_size
        return slice(head, head + 1)

    def vocabulary(self, vocab_size: int) -> slice:
        """This rank's tokens. The last part may be shorter, because a vocabulary need not be divisible."""
        size = -(-vocab_size // self.tp_size)
        return slice(min(self.tp_rank * size, vocab_size), min((self.tp_rank + 1) * size, vocab_size))


def check_sizes(config: ModelConfig, tp_size: int, pp_size: int, group: GroupConfig | None = None) -> None:
    """Raise ConfigError, naming the size, if the model cannot be cut into that many parts."""
    if group is not None and group.ep:
        _check_expert_sizes(config, tp_size, group)
    sizes = [("num_attention_heads", config.num_heads)]
    if config.moe is None or not all(config.sparse):
        sizes.append(("intermediate_size", config.intermediate))
    if config.moe is not None and not (group is not None and group.ep):
        sizes.append(("the experts' intermediate size", config.moe.intermediate))
    for name, size in sizes:
        if size % tp_size:
            raise ConfigError(f"tp {tp_size} does not divide {name} {size} of this model", param="tp")
    if config.num_kv_heads % tp_size and tp_size % config.num_kv_heads:
        raise ConfigError(
            f"tp {tp_size} and num_key_value_heads {config.num_kv_heads} of this model: one must divide the other",
            param="tp",
        )
    if config.num_layers % pp_size:
        raise ConfigError(
            f"pp {pp_size} does not divide num_hidden_layers {config.num_layers} of this model", param="pp"
        )


def _check_expert_sizes(config: ModelConfig, tp_size: int, group: GroupConfig) -> None:
    """Raise ConfigError, naming the size, if the model's experts cannot be spread so."""
    size = group.dp * tp_size
    if config.moe is None:
        raise ConfigError("--ep spreads experts, and this model has none; leave it out", param="ep")
    if config.moe.num_experts < size:
        raise ConfigError(
            f"--ep: this model has {config.moe.num_experts} experts, fewer than the {size} ranks (dp {group.dp} * tp "
            f"{tp_size})",
            param="ep",
        )
    if config.moe.num_experts % size:
        raise ConfigError(
            f"--ep: dp {group.dp} * tp {tp_size} = {size} ranks do not divide the {config.moe.num_experts} experts of "
            "this model",
            param="ep",
        )
