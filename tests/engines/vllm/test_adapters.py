"""Adapters in a directory: named by folder, told apart by content, and refused with a reason before vLLM starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.adapters import write_adapter

from kvrelay.config import VllmConfig, WorkerConfig
from kvrelay.core.adapters import adapter_name
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.registry import build_host
from kvrelay.engines.vllm.adapters import adapter_arguments, read_adapters, with_empty_slot
from kvrelay.errors import ConfigError

MODEL = bundled_checkpoint_path()


def _ids(folder: Path) -> list[str]:
    return [each.id for each in read_adapters(str(folder), MODEL, "model")]


def test_an_id_has_the_folders_name_and_depends_on_every_file(tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / name, 1) for name in ("chat", "sql@2"))
    (tmp_path / "no-adapter").mkdir()
    chat, sql = _ids(tmp_path)
    assert (adapter_name(chat), adapter_name(sql)) == ("chat", "sql@2")
    assert chat.rpartition("@")[2] == sql.rpartition("@")[2], "equal contents"
    config = json.loads((first / "adapter_config.json").read_text())
    (first / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    shutil.rmtree(second)
    write_adapter(second, 2)
    assert not {chat, sql} & set(_ids(tmp_path))


def test_vllm_gets_slots_and_a_rank_that_fit_all(tmp_path: Path) -> None:
    for number in range(5):
        write_adapter(tmp_path / str(number), number, rank=9 if number == 3 else 2)
    adapters = read_adapters(str(tmp_path), MODEL, "model")
    assert [each.number for each in adapters] == [1, 2, 3, 4, 5]
    assert adapter_arguments(adapters) == {"enable_lora": True, "max_loras": 4, "max_cpu_loras": 5, "max_lora_rank": 16}
    assert adapter_arguments(read_adapters("", MODEL, "model")) == {}


@pytest.mark.parametrize(("num_adapters", "max_loras", "num_slots"), [(1, 1, 2), (5, 4, 6), (2, 8, 8)])
def test_on_a_cpu_the_last_slot_stays_empty(num_adapters: int, max_loras: int, num_slots: int) -> None:
    given = {"max_loras": max_loras, "max_cpu_loras": num_adapters, "seed": 1}
    assert with_empty_slot(given) == {"max_loras": num_slots, "max_cpu_loras": num_slots, "seed": 1}
    assert with_empty_slot({"seed": 1}) == {"seed": 1}


def _without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _cut(folder: Path) -> None:
    (folder / "adapter_model.safetensors").write_bytes(b"\x10\x00")


def _of_a_wider_model(folder: Path) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    save_file({name: np.zeros((4, 4096), np.float32)}, folder / "adapter_model.safetensors")


def _of_other_modules(folder: Path) -> None:
    name = "base_model.model.transformer.h.0.attn.lora_A.weight"
    save_file({name: np.zeros((4, 4096), np.float32)}, folder / "adapter_model.safetensors")


def _config(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_without_weights, "No such file"),
        (_cut, "no complete safetensors file"),
        (_of_a_wider_model, "of another model: .*q_proj.*4096"),
        (_of_other_modules, "of another model: none of its 1 tensors"),
        (_config(r=8), "has the shape"),
        (_config(r=1024), "rank 1024"),
        (_config(r="4"), "not one of a LoRA"),
        (_config(peft_type="IA3"), "not one of a LoRA"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "no JSON"),
        (lambda folder: folder.rename(folder.with_name("model")), "the name of its model"),
        (shutil.rmtree, "no folder with an adapter_config.json"),
    ],
)
def test_what_vllm_could_not_load_is_refused_with_its_reason(
    tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    spoil(write_adapter(tmp_path / "chat", 1))
    with pytest.raises(ConfigError, match=reason) as raised:
        read_adapters(str(tmp_path), MODEL, "model")
    assert raised.value.param == "lora_dir"


@pytest.mark.parametrize("name", ["mock", "torch", "openai"])
def test_other_engines_refuse_adapters(name: str) -> None:
    settings = WorkerConfig(model_path=MODEL, engine_kind=name, vllm=VllmConfig(lora_dir="adapters"))
    with pytest.raises(ConfigError, match=f"engine {name} has no adapters"):
        build_host(name, settings, "worker")
