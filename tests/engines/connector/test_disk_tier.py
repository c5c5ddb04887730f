"""kvrelay's disk tier under vLLM's own classes: what vLLM's tiering asks of a secondary tier (``make test-vllm``).

vLLM's CPU build cannot offload, so no engine runs here; the tier is made by vLLM's factory from a configuration.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace as Names
from typing import Any
from unittest import mock

import numpy as np
import pytest
from tests.patience import until

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

BLOCK_BYTES, NUM_BLOCKS = 1024, 16
jobs = itertools.count()


def spec(model: str = "some/model", tp_size: int = 1) -> Any:
    parallel = Names(tp_size=tp_size, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
    config = Names(
        groups=(Names(tokens_per_block=16, layer_names=("a", "b")),),
        model=Names(name=model, dtype="bfloat16"),
        cache=Names(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=parallel,
        replicated_layout=False,
        canonical_layout=False,
        kv_cache_layout=None,
    )
    return Names(config=config, blocks_per_chunk=1)


class Offloaded:
    """A CPU tier of vLLM's, [NUM_BLOCKS, BLOCK_BYTES] int8, over a tier of ours."""

    def __init__(self, directory: Path, max_bytes: str = "1MiB", **different: Any) -> None:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        self.blocks = np.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=np.int8)
        config = {"type": "KvrelayDiskTier", "module_path": "kvrelay.engines.connector.disk_tier"}
        settings = {**config, "directory": str(directory), "max_bytes": max_bytes}
        self.tier = SecondaryTierFactory.create_secondary_tier(settings, memoryview(self.blocks), spec(**different))

    def job(self, keys: list[bytes], *, load: bool = False) -> Any:
        """Submitted, and waited for: its result. Block i of the CPU tier has the bytes of key i."""
        from vllm.v1.kv_offload.tiering.base import TransferJob

        job = TransferJob(next(jobs), keys, np.arange(len(keys)), load, Names())
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        results: list[Any] = []
        until(lambda: bool(results.extend(self.tier.get_finished_jobs()) or results))
        (result,) = results
        assert result.job_id == job.job_id
        return result

    def has(self, key: bytes) -> bool:
        return bool(self.tier.lookup(key, Names()).name == "HIT")

    def fill(self, seed: int = 1) -> np.ndarray[Any, Any]:
        self.blocks[:] = np.random.default_rng(seed).integers(-128, 127, self.blocks.shape)
        return self.blocks.copy()


def keys(count: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(32) + bytes(4) for _ in range(count)]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """vLLM changes it when it is imported, and what other tests start would no longer be forked (``tests/nursery``)."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def offloaded(tmp_path: Path) -> Iterator[Callable[..., Offloaded]]:
    opened: list[Offloaded] = []

    def make(**settings: Any) -> Offloaded:
        opened.append(Offloaded(tmp_path / "kv", **settings))
        return opened[-1]

    yield make
    for each in opened:
        each.tier.shutdown()


def test_what_was_stored_is_loaded_also_by_another_engine(offloaded: Callable[..., Offloaded]) -> None:
    first, names = offloaded(), keys(8)
    stored = first.fill()
    assert not any(map(first.has, names))
    assert first.job(names).success
    assert all(map(first.has, names))
    assert not first.tier.has_pending_work()
    other = offloaded()
    until(lambda: all(map(other.has, names)))
    result = other.job(names[::-1], load=True)
    assert (result.success, result.transfer_bytes) == (True, 8 * BLOCK_BYTES)
    assert (other.blocks[:8] == stored[:8][::-1]).all()


@pytest.mark.parametrize("different", [{"model": "another/model"}, {"tp_size": 2}])
def test_another_model_or_layout_finds_nothing(offloaded: Callable[..., Offloaded], different: dict[str, Any]) -> None:
    first, names = offloaded(), keys(4)
    first.fill()
    assert first.job(names).success
    other = offloaded(**different)
    other.tier.drain_jobs()
    result = other.job(names, load=True)
    assert (result.success, result.successful_keys) == (False, None)


def test_a_damaged_block_is_lost_alone(offloaded: Callable[..., Offloaded], tmp_path: Path) -> None:
    """Served as it is, it would be wrong tokens: no engine of the field looks."""
    from kvrelay.engines.connector.disk_tier import name_of

    tier, names = offloaded(), keys(4)
    stored = tier.fill()
    assert tier.job(names).success
    (path,) = (tmp_path / "kv").rglob(f"{name_of(names[2]).sequence_hash:016x}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    result = tier.job(names, load=True)
    assert not result.success
    assert list(result.successful_keys) == [names[0], names[1], names[3]]
    assert (tier.blocks[[0, 1, 3]] == stored[[0, 1, 3]]).all()
    assert not tier.has(names[2])


def test_the_limit_holds_and_what_is_touched_stays(offloaded: Callable[..., Offloaded]) -> None:
    tier, names = offloaded(max_bytes="18KiB"), keys(24)
    tier.fill()
    for name in names:
        tier.job([name])
        tier.tier.touch(names[:1], Names())
    assert tier.has(names[0])
    assert tier.has(names[-1])
    assert not tier.has(names[1])


def test_drained_jobs_have_ended(offloaded: Callable[..., Offloaded]) -> None:
    from vllm.v1.kv_offload.tiering.base import TransferJob

    tier = offloaded()
    tier.fill()
    for number in range(8):
        tier.tier.submit_store(TransferJob(number, keys(4, number), np.arange(4), False, Names()))
    assert tier.tier.has_pending_work()
    tier.tier.drain_jobs()
    assert sorted(result.job_id for result in tier.tier.get_finished_jobs()) == list(range(8))


def test_wrong_settings_are_refused(tmp_path: Path) -> None:
    from kvrelay.errors import ConfigError

    with pytest.raises(ConfigError, match="amount of memory"):
        Offloaded(tmp_path / "kv", max_bytes="much")
    with pytest.raises(ConfigError, match="one block"):
        Offloaded(tmp_path / "kv", max_bytes="1KiB")
