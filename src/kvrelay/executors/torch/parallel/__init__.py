"""One model over several processes: tensor and pipeline parallelism behind the executor's contract.

``ParallelExecutor`` is what the engine sees; it starts the rank processes, describes each step to them and gives back
what the sampling rank answers. Nothing here but the ranks' own modules imports torch.
"""

from kvrelay.executors.torch.parallel.rank import ParallelRank

__all__ = ["ParallelRank"]
