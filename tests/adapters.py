"""Adapters (LoRA) with random weights for tests, as PEFT writes them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from kvrelay.data import bundled_checkpoint_path

MODULES = ("q_proj", "v_proj", "down_proj")


def write_adapter(folder: Path, seed: int, *, rank: int = 4, scale: float = 0.1) -> Path:
    """One for the bundled model, of its layers' MODULES. ``scale``: the deviation of its weights; 0.1 is enough that
    greedy answers differ from the model's own."""
    drawn = np.random.default_rng(seed)
    tensors = {}
    with safe_open(bundled_checkpoint_path() / "model.safetensors", "np") as base:
        shapes = {name: base.get_slice(name).get_shape() for name in base.keys()}  # noqa: SIM118 - no mapping
    for name, shape in shapes.items():
        if not name.endswith(tuple(f"{module}.weight" for module in MODULES)):
            continue
        rows, columns = shape
        module = f"base_model.model.{name.removesuffix('.weight')}"
        for half, size in (("A", (rank, columns)), ("B", (rows, rank))):
            tensors[f"{module}.lora_{half}.weight"] = (scale * drawn.standard_normal(size)).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(MODULES), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
