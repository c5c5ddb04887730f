"""Damaged checkpoints give one clear line; a fingerprint tells checkpoints apart."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvrelay.errors import CheckpointError, ConfigError
from kvrelay.executors.torch.kernels import numba_kernels
from kvrelay.executors.torch.shards import weights_fingerprint


@pytest.fixture
def model(tmp_path: Path, checkpoint_of: Callable[[str], Path]) -> Path:
    return Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "model"))


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(model / "model.safetensors")
    change(tensors)
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "model.safetensors")


def drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def fails(model: Path, build: Any, match: str) -> None:
    with pytest.raises(CheckpointError, match=match) as caught:
        build(model)
    assert "\n" not in caught.value.message


def test_missing_tensor(model: Path, build: Any) -> None:
    rewrite(model, lambda tensors: drop(tensors, "model.layers.1.mlp.up_proj.weight"))
    fails(model, build, r"no tensor model\.layers\.1\.mlp\.up_proj\.weight")


def test_missing_head(model: Path, build: Any) -> None:
    rewrite(model, lambda tensors: drop(tensors, "lm_head.weight"))
    fails(model, build, r"lm_head\.weight")


def test_surplus_tensor(model: Path, build: Any) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(2)}))
    fails(model, build, r"model\.layers\.9\.extra")


def test_derived_buffers_are_ignored(model: Path, build: Any) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}))
    assert build(model).num_blocks == 256


def test_misshapen_and_mistyped_tensor(model: Path, build: Any) -> None:
    rewrite(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(7)}))
    fails(model, build, r"model\.norm\.weight .* shape \(7,\), expected \(256,\)")
    rewrite(model, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(256, dtype=torch.int32)}))
    fails(model, build, r"model\.norm\.weight .* expected a float type")


@pytest.mark.parametrize("share", [0.0, 0.00001, 0.5, 0.999])
def test_truncated_file(model: Path, build: Any, share: float) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: int(len(content) * share)])
    fails(model, build, "complete safetensors")


def test_missing_files_and_bad_index(model: Path, build: Any) -> None:
    (model / "model.safetensors").rename(model / "moved")
    fails(model, build, r"no model\.safetensors")
    index = model / "model.safetensors.index.json"
    index.write_text("{}")
    fails(model, build, "damaged")
    index.write_text(json.dumps({"weight_map": {"a": "shard.safetensors"}}))
    fails(model, build, r"no shard shard\.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "../moved"}}))
    fails(model, build, "outside the checkpoint")


def test_a_tensor_in_two_shards(model: Path, build: Any) -> None:
    """The index names one of them, and what is read would be chance."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    save_file(tensors, model / "a.safetensors")
    save_file({"model.norm.weight": torch.zeros(256)}, model / "b.safetensors")
    names = dict.fromkeys(tensors, "a.safetensors") | {"model.norm.weight": "b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    fails(model, build, r"b\.safetensors has a tensor model\.norm\.weight that another shard has, too: download anew")


def test_a_context_of_millions_takes_the_memory_of_the_pools(model: Path, build: Any) -> None:
    """16 million positions are 2 GiB of angles, and as many gigabytes of rows."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**20}))
    tracemalloc.start()
    try:
        executor = build(model, max_model_len=0)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
    assert executor.max_model_len == 2**20
    executor.warm_up()


@pytest.mark.parametrize("num_blocks", [1, 8, 64])
def test_a_small_pool_is_warmed_up_too(model: Path, build: Any, num_blocks: int) -> None:
    build(model, num_blocks=num_blocks, max_model_len=0, attention="torch").warm_up()


def test_a_context_without_room_for_an_answer(model: Path, build: Any) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at least 2"):
        build(model, max_model_len=1)


def test_fingerprint(model: Path, checkpoint_of: Callable[[str], Path]) -> None:
    before = weights_fingerprint(model)
    assert before == weights_fingerprint(checkpoint_of("llama"))
    rewrite(model, lambda tensors: tensors.update({"model.norm.weight": tensors["model.norm.weight"] + 1}))
    changed = weights_fingerprint(model)
    assert changed != before
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    assert weights_fingerprint(model) not in (before, changed)


@pytest.mark.parametrize("settings", [{"dtype": "float16"}, {"max_model_len": 10**6}, {"num_blocks": 10**12}], ids=str)
def test_settings_that_cannot_be_honoured(model: Path, build: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        build(model, **settings)


def test_bfloat16_needs_a_cpu_that_multiplies_it(model: Path, build: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_kernels, "multiplies_bfloat16", lambda: False)
    with pytest.raises(ConfigError, match="AVX-512"):
        build(model, dtype="bfloat16")
    assert build(model, dtype="auto").kv_layout.model[0].dtype == "float32"
