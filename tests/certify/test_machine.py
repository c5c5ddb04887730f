"""The machine and the model's KV: what voids a time, and the shape that a checkpoint's config means."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from kvrelay.certify.findings import Group, Row, Verdict
from kvrelay.certify.machine import MAX_FOREIGN_SHARE, kv_layout, watched, window_of
from kvrelay.core.layout import paged_kv
from kvrelay.errors import UnsupportedModelError

ROW = Row(Group.FAST, "bandwidth", "nixl", Verdict.FAIL, "slow")


def config(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


SIZES = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}


def test_times_of_a_machine_in_use_are_void_and_say_so() -> None:
    with watched() as watch:
        pass
    most = MAX_FOREIGN_SHARE * (psutil.cpu_count() or 1)
    watch.foreign_cores = most
    assert watch.judged(ROW) == ROW
    watch.foreign_cores = most + 0.1
    row = watch.judged(ROW)
    assert row.verdict is Verdict.VOID
    assert row.reason.startswith("void: other processes took")
    watch.foreign_cores, watch.stolen_cores = 0.0, most + 0.1
    assert f"took 0.0, and this machine's host {most + 0.1:.1f}, of" in watch.judged(ROW).reason
    assert row.reason.endswith("slow")


def test_heads_and_their_size_come_from_the_config(tmp_path: Path) -> None:
    path = config(tmp_path, **SIZES, num_key_value_heads=2, torch_dtype="bfloat16", sliding_window=128)
    assert kv_layout(path, 16) == paged_kv(4, 2, 16, 64, "bfloat16")
    assert kv_layout(path, 16, tp=4, dtype="float32") == paged_kv(4, 4, 16, 64, "float32", 4, 1, 2)
    assert window_of(path) == 128


def test_a_latent_has_one_vector_that_every_rank_holds(tmp_path: Path) -> None:
    path = config(tmp_path, **SIZES, kv_lora_rank=512, qk_rope_head_dim=64, dtype="bfloat16")
    layout = kv_layout(path, 16, tp=2)
    # 576 values of 2 bytes, 4 layers, on each of 2 ranks.
    assert layout.bytes_per_token == 576 * 2 * 4 * 2
    assert layout.flaw is None


@pytest.mark.parametrize("fields", [{}, {**SIZES, "num_key_value_heads": 3}], ids=["no sizes", "tp does not divide"])
def test_a_shape_that_cannot_be_is_named(fields: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        kv_layout(config(tmp_path, **fields), 16, tp=2)
