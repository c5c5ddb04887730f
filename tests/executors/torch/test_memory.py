"""What an engine keeps does not grow with the number of different batches that it has computed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvrelay.executors.torch.kernels.numba_kernels import multiplies_bfloat16

BATCHES = """
import re
from kvrelay import LLM, SamplingParams

def private_mb():
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"Private_Dirty: +([0-9]+)", file.read())[1]) // 1024

with LLM(dtype="bfloat16", num_blocks=64, num_threads=1, enable_prefix_caching=False, device="cpu") as llm:
    figures = [private_mb()]
    for num_sizes in (260, 60):
        for length in range(1, num_sizes + 1):
            llm.generate([20 + i % 400 for i in range(length)], SamplingParams(max_tokens=1))
        figures.append(private_mb())
    print(*figures)
"""


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not multiplies_bfloat16(), reason="this CPU does not multiply bfloat16")
def test_batches_of_260_sizes_leave_no_more_than_the_last_ones() -> None:
    """Each size has products of its own: 0.4 MB of code for each of four or five shapes. The first 60 are generated
    again: what they have replaced is freed."""
    done = subprocess.run([sys.executable, "-c", BATCHES], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    loaded, once, again = map(int, done.stdout.split())
    assert once - loaded < 320
    assert again - once < 40
