"""A rank's process:

python -m kvrelay.executors.torch.parallel PARENT_PID COMMANDS_FD SIDE_FD MOVES_FD STEP_FD POOL_FD
"""

import logging
import os
import sys

from kvrelay.executors.torch import share_openmp

share_openmp()

from kvrelay.executors.torch.parallel.rank_process import run  # noqa: E402  which imports torch

code = run(*(int(word) for word in sys.argv[1:]))
logging.shutdown()
# Exit without the interpreter's cleanup: threads of the process groups may wait for a rank that is gone.
os._exit(code)
