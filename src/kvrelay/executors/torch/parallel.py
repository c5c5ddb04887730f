"""Which part of the model this process holds: its rank in the tensor- and pipeline-parallel groups.

A value handed down by constructor; there is no global state, so two engines can live in one process.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvrelay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ParallelRank:
    """Rank and size of the tensor- and pipeline-parallel groups. A runner computes the whole model: sizes are 1."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        if self.tp_size != 1 or self.pp_size != 1:
            raise ConfigError(f"tensor parallel {self.tp_size} and pipeline parallel {self.pp_size}: only 1 x 1 runs")
