"""One model over several processes: tensor and pipeline parallelism behind the executor's contract.

The engine uses ``ParallelExecutor``, which starts the rank processes, describes each step to them and returns the
answer of the sampling rank. Only the modules of the rank processes import torch.
"""

from kvrelay.executors.torch.parallel.rank import ParallelRank

__all__ = ["ParallelRank"]
