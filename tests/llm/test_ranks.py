"""An embedded engine of two ranks: the same answers, and an end with the reason when a rank ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests import nursery
from tests.patience import PATIENCE_S, until

from kvrelay import LLM, SamplingParams
from kvrelay.errors import ConfigError, EngineDeadError
from kvrelay.executors.torch.parallel import processes

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SETTINGS = {"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 1024, "dtype": "float32", "device": "cpu"}
PROMPTS = [[20 + number * 7 % 400 for number in range(length)] for length in (3, 40, 300)]


def lost(llm: LLM) -> str:
    try:
        llm.encode("text")
    except EngineDeadError as exc:
        return exc.message
    return ""


@pytest.mark.slow
def test_two_ranks_answer_as_one_and_a_lost_rank_ends_the_idle_engine() -> None:
    with LLM(**SETTINGS) as one:
        expected = [output.token_ids for output in one.generate(PROMPTS, GREEDY)]
    with LLM(tp=2, rank_timeout_s=60.0, **SETTINGS) as two:
        assert [output.token_ids for output in two.generate(PROMPTS, GREEDY)] == expected
        os.kill(min(nursery.RANKS), signal.SIGKILL)
        deadline = time.monotonic() + PATIENCE_S
        # Nothing asks the ranks for a step. The worker is unlisted first, and says why when it has ended.
        while not re.search(r"rank \d .* was killed by SIGKILL", lost(two)):
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.slow
def test_ranks_that_move_their_own_kv_hand_over() -> None:
    """As on CUDA always. The loopback between workers of one process does not reach into its ranks."""
    with LLM(**SETTINGS) as one:
        expected = [output.token_ids for output in one.generate(PROMPTS, GREEDY)]
    apart = {"prefill": 1, "decode": 1, "disagg_policy": "always", "rank_timeout_s": 60.0}
    with LLM(tp=2, kv_transfer_per_rank=True, **apart, **SETTINGS) as two:
        assert [output.token_ids for output in two.generate(PROMPTS, GREEDY)] == expected
        (decode,) = (worker for worker in two.status() if worker["role"] == "decode")
        assert decode["decode"]["num_remote_done"] == len(PROMPTS)


def test_the_mock_engine_has_one_rank() -> None:
    with pytest.raises(ConfigError, match="the mock engine has one rank"):
        LLM(engine="mock", pp=2)


@pytest.mark.slow
def test_nothing_is_left_when_it_is_ended_while_ranks_load(tmp_path: Path) -> None:
    code = "from kvrelay import LLM; LLM(tp=2, num_threads=2, device='cpu', num_blocks=64)"
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def num_ranks() -> int:
        with suppress(psutil.NoSuchProcess):  # a child that ends just now
            return sum(processes.MODULE in each.cmdline() for each in psutil.Process(process.pid).children())
        return 0

    with subprocess.Popen([sys.executable, "-c", code], env=environment, stderr=subprocess.DEVNULL) as process:
        until(lambda: num_ranks() == 2)
        process.terminate()
    assert process.returncode == -signal.SIGTERM
    assert not list(tmp_path.glob("kvrelay-ranks*"))
