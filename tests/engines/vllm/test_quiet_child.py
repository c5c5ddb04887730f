"""vLLM's many process groups of one rank share a thread of gloo."""

from __future__ import annotations

import subprocess
import sys

from tests.patience import PATIENCE_S

CHILD = """
import os
import torch, torch.distributed as dist
from kvrelay.engines.vllm import quiet_child

def num_polled():
    # A loop opens its epoll descriptor before it starts its thread, which names itself when it runs.
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[eventpoll]"
        except OSError:
            pass  # closed meanwhile: that of the listing itself
    return found

before = num_polled()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.new_group([0], backend="gloo") for _ in range(3)]
for group in groups:
    values = torch.ones(2)
    dist.all_reduce(values, group=group)
    assert values.tolist() == [1.0, 1.0]
    dist.barrier(group=group)
print(num_polled() - before, flush=True)
os._exit(0)  # a thread of gloo that lets go of a tensor while the interpreter ends, aborts
"""


def test_groups_of_one_rank_share_a_thread_and_work() -> None:
    command = [sys.executable, "-W", "ignore", "-c", CHILD]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
