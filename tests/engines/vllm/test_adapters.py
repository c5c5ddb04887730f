"""Adapters of a worker with vLLM: named, told apart by content, and refused with a reason before vLLM reads them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.adapters import write_adapter
from tests.engines.vllm.scripted import ScriptedVllm

from kvrelay.config import VllmConfig, WorkerConfig
from kvrelay.core.adapters import AdapterEntry, adapter_name
from kvrelay.data import bundled_checkpoint_path
from kvrelay.engines.registry import build_host
from kvrelay.engines.vllm.adapters import LoadedAdapters, adapter_arguments, read_adapters, with_empty_slot
from kvrelay.errors import ConfigError, InvalidInputError, WorkerUnavailableError

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
    assert [adapter_name(each.id) for each in adapters] == ["0", "1", "2", "3", "4"]
    assert _reserved(tmp_path) == (4, 5, 16)
    assert adapter_arguments(read_adapters("", MODEL, "model"), VllmConfig()) == {}


def _reserved(folder: Path | None, **flags: int) -> tuple[int, int, int]:
    """Slots, room in host memory, rank."""
    adapters = read_adapters("" if folder is None else str(folder), MODEL, "model")
    found = adapter_arguments(adapters, VllmConfig(**flags))
    assert found.pop("enable_lora")
    return found["max_loras"], found["max_cpu_loras"], found["max_lora_rank"]


def test_room_for_run_time_is_reserved_at_the_start(tmp_path: Path) -> None:
    assert _reserved(None, max_loras=2) == (2, 32, 16)
    assert _reserved(None, max_loras=2, max_cpu_loras=8, max_lora_rank=10) == (2, 8, 16)
    assert _reserved(None, max_loras=40) == (40, 40, 16)
    for number in range(3):
        write_adapter(tmp_path / str(number), number, rank=20)
    assert _reserved(tmp_path, max_loras=2) == (2, 32, 32)
    for flags, param in (
        ({"max_loras": 1, "max_lora_rank": 16}, "max_lora_rank"),
        ({"max_loras": 1, "max_cpu_loras": 2}, "max_cpu_loras"),
        ({"max_loras": 5, "max_cpu_loras": 4}, "max_cpu_loras"),
    ):
        with pytest.raises(ConfigError, match=param.replace("_", "-")) as raised:
            _reserved(tmp_path, **flags)
        assert raised.value.param == param


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
@pytest.mark.parametrize("flags", [{"lora_dir": "adapters"}, {"max_loras": 1}])
def test_other_engines_refuse_adapters(name: str, flags: dict[str, object]) -> None:
    settings = WorkerConfig(model_path=MODEL, engine_kind=name, vllm=VllmConfig(**flags))
    with pytest.raises(ConfigError, match=f"engine {name} has no adapters"):
        build_host(name, settings, "worker")


def _entry(folder: Path) -> AdapterEntry:
    """As a frontend makes it from the files that are there now."""
    (found,) = (each for each in read_adapters(str(folder.parent), MODEL, "model") if each.path == folder.resolve())
    return AdapterEntry(folder.name, "model", str(folder), found.digest)


def _loaded(**limits: int) -> tuple[LoadedAdapters, ScriptedVllm]:
    vllm = ScriptedVllm()
    limits = {"max_adapters": 2, "max_rank": 8, **limits}
    return LoadedAdapters(vllm, lambda *values: values, model_path=MODEL, **limits), vllm


async def test_adapters_come_and_go_at_run_time(tmp_path: Path) -> None:
    chat, sql, third = (_entry(write_adapter(tmp_path / name, seed)) for seed, name in enumerate(("chat", "sql", "x")))
    adapters, vllm = _loaded()
    for entry in (chat, sql, chat):
        await adapters.load(entry)
    assert vllm.loaded_adapters == [(chat.id, 1, chat.path), (sql.id, 2, sql.path)]
    assert adapters.request(sql.id) == (sql.id, 2, sql.path)
    assert adapters.request("") is None
    with pytest.raises(InvalidInputError, match=r"has 2 adapters, .*--max-cpu-loras 2"):
        await adapters.load(third)
    await adapters.drop(chat.id)
    assert vllm.removed_adapters == [1]
    with pytest.raises(WorkerUnavailableError, match=f"no adapter {chat.id}"):
        adapters.request(chat.id)
    await adapters.load(third)
    await adapters.drop(sql.id)
    await adapters.load(chat)
    assert [number for _, number, _ in vllm.loaded_adapters] == [1, 2, 3, 4], "vLLM never sees a number twice"


async def test_an_adapter_that_vllm_does_not_forget_keeps_its_place(tmp_path: Path) -> None:
    """vLLM must not have more than it may: it would evict others, and read them again from changed files."""
    chat, sql = (_entry(write_adapter(tmp_path / name, seed)) for seed, name in enumerate(("chat", "sql")))
    adapters, vllm = _loaded(max_adapters=1)
    await adapters.load(chat)
    vllm.refusal = RuntimeError("busy")
    with pytest.raises(WorkerUnavailableError, match=f"vLLM does not forget adapter {chat.id}: busy"):
        await adapters.drop(chat.id)
    vllm.refusal = None
    with pytest.raises(InvalidInputError, match="unload one"):
        await adapters.load(sql)
    await adapters.drop(chat.id)
    assert vllm.removed_adapters == [1]
    await adapters.load(sql)


async def test_an_adapter_that_a_worker_cannot_have_is_refused_with_its_reason(tmp_path: Path) -> None:
    chat = write_adapter(tmp_path / "chat", 1)
    entry = _entry(chat)
    adapters, vllm = _loaded(max_rank=2)
    with pytest.raises(InvalidInputError, match="rank 4, above --max-lora-rank 2"):
        await adapters.load(entry)
    adapters, vllm = _loaded()
    vllm.refusal = ValueError("modules_to_save\nis not supported")
    with pytest.raises(InvalidInputError, match="vLLM refuses adapter chat: modules_to_save is not supported"):
        await adapters.load(entry)
    vllm.refusal = None
    shutil.rmtree(chat)
    with pytest.raises(InvalidInputError, match="No such file"):
        await adapters.load(entry)
    write_adapter(chat, 2)
    with pytest.raises(InvalidInputError, match=f"chat was replaced: .*{entry.digest} were loaded"):
        await adapters.load(entry)
    assert vllm.loaded_adapters == []


async def test_an_adapter_that_is_replaced_while_vllm_reads_it_is_removed(tmp_path: Path) -> None:
    chat = write_adapter(tmp_path / "chat", 1)
    entry = _entry(chat)
    adapters, vllm = _loaded()

    def replace(request: object) -> None:
        shutil.rmtree(chat)
        write_adapter(chat, 2)

    vllm.on_load = replace
    with pytest.raises(InvalidInputError, match="chat was replaced"):
        await adapters.load(entry)
    assert vllm.removed_adapters == [1]
    assert not adapters.has(entry.id)
