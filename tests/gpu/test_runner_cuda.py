"""The CUDA path, which is plain torch, against the CPU's."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvrelay.config.settings import EngineConfig, RunnerConfig  # noqa: E402
from kvrelay.core.layout import paged_kv  # noqa: E402
from kvrelay.core.sampling import SamplingParams  # noqa: E402
from kvrelay.engine.step import Executor, NewSequence, SchedulerOutput  # noqa: E402
from kvrelay.executors.torch import build_executor  # noqa: E402
from kvrelay.executors.torch.kv_pool import KvPool  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NOTHING = np.zeros(0, dtype=np.int32)
BLOCKS_PER_SEQUENCE = 8


def generate(executor: Executor, prompts: list[list[int]], num_outputs: int) -> list[list[int]]:
    """Greedy: all prompts in one step, then decode steps."""
    count = len(prompts)
    new = tuple(
        NewSequence(
            slot,
            f"r{slot}",
            prompt,
            len(prompt),
            0,
            range(slot * BLOCKS_PER_SEQUENCE, (slot + 1) * BLOCKS_PER_SEQUENCE),
            SamplingParams(temperature=0.0),
            0,
        )
        for slot, prompt in enumerate(prompts)
    )
    slots, samples = np.arange(count, dtype=np.int32), np.ones(count, dtype=np.bool_)
    lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int32)
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in range(num_outputs):
        counts = np.ones(count, dtype=np.int32) if step else lengths
        work = SchedulerOutput(step, () if step else new, (), slots, counts, samples, NOTHING, NOTHING, NOTHING)
        for output, token in zip(outputs, executor.execute(work).token_ids):
            output.append(token)
    executor.shutdown()
    return outputs


def build(model: Path, device: str) -> Executor:
    runner = RunnerConfig(device=device, dtype="float32")
    return build_executor(model, runner, EngineConfig(num_blocks=64, max_model_len=128, max_num_seqs=8))


@pytest.fixture(scope="module", params=["llama", "mistral", "qwen3-moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvrelay.executors.torch.checkpoints import make_model

    path = tmp_path_factory.mktemp("models") / request.param
    make_model(path, request.param, "tiny", dtype="float32")
    return path


def make_prompts() -> list[list[int]]:
    rng = Random(0)
    return [[rng.randrange(1000) for _ in range(length)] for length in (3, 20, 90)]


def test_float32_equals_the_cpu(model: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    executor = build(model, "cuda")
    executor.warm_up()
    assert generate(executor, make_prompts(), 8) == generate(build(model, "cpu"), make_prompts(), 8)


def test_checksums_are_those_of_the_same_bytes_on_the_host() -> None:
    layout = paged_kv(num_layers=2, num_kv_heads=2, block_size=16, head_dim=64, dtype="bfloat16")
    device, host = (KvPool(layout, 8, torch.device(kind), torch.bfloat16) for kind in ("cuda", "cpu"))
    device.tensor.normal_()
    host.tensor.copy_(device.tensor)
    assert device.checksums((3, 0, 7)) == host.checksums((3, 0, 7))
    assert len(set(device.checksums(range(8)))) == 8
