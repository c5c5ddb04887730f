"""This machine while certify measures: whether others use it. And the KV of a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import psutil

from kvrelay.certify.findings import Row, Verdict
from kvrelay.core.layout import DTYPE_BYTES, KVLayout, KVRegion, RegionCut, paged_kv
from kvrelay.errors import UnsupportedModelError
from kvrelay.executors.checkpoint_facts import read_json_object

MAX_FOREIGN_SHARE = 0.15
"""Of all cores: what other processes may take while times are measured."""


class Watch:
    """How many cores other processes took while this was open, and how many of a virtual machine's its host did not
    give it although they were wanted (steal)."""

    def __init__(self) -> None:
        self._all_s, self._own_s, self._stolen_s, self._began_s = _all_s(), _own_s(), _stolen_s(), time.monotonic()
        self.foreign_cores = self.stolen_cores = 0.0

    def close(self) -> None:
        wall_s = max(0.05, time.monotonic() - self._began_s)
        self.foreign_cores = max(0.0, (_all_s() - self._all_s) - (_own_s() - self._own_s)) / wall_s
        self.stolen_cores = max(0.0, _stolen_s() - self._stolen_s) / wall_s

    def judged(self, row: Row) -> Row:
        """The row, void if its times were taken on a machine in use. Figures stay."""
        num_cores = psutil.cpu_count() or 1
        if row.verdict is Verdict.SKIP or self.foreign_cores + self.stolen_cores <= MAX_FOREIGN_SHARE * num_cores:
            return row
        stolen = f", and this machine's host {self.stolen_cores:.1f}," if self.stolen_cores >= 0.05 else ""
        why = f"void: other processes took {self.foreign_cores:.1f}{stolen} of {num_cores} cores meanwhile"
        return msgspec.structs.replace(row, verdict=Verdict.VOID, reason=f"{why}; {row.reason}")


@contextmanager
def watched() -> Iterator[Watch]:
    """Around a measurement of times; our children must live until its end."""
    watch = Watch()
    try:
        yield watch
    finally:
        watch.close()


def _all_s() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.system + times.nice)


def _stolen_s() -> float:
    return float(getattr(psutil.cpu_times(), "steal", 0.0))


def _own_s() -> float:
    """Of this process, its children, and theirs; of those that have ended, too."""
    times = psutil.Process().cpu_times()
    return cpu_seconds() + float(times.children_user + times.children_system)


def cpu_seconds(pid: int | None = None) -> float:
    """Of the process ``pid``, or of this one, and of all that run below it."""
    total_s, root = 0.0, psutil.Process(pid)
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            total_s += times.user + times.system
    return total_s


class _Sizes(msgspec.Struct):
    num_hidden_layers: int
    num_attention_heads: int
    hidden_size: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    kv_lora_rank: int | None = None
    qk_rope_head_dim: int = 64
    torch_dtype: str | None = None
    dtype: str | None = None
    sliding_window: int | None = None


def window_of(model_path: Path) -> int:
    """The attention's window in tokens; 0: none. Raises CheckpointError."""
    window = read_json_object(model_path / "config.json").get("sliding_window")
    return window if isinstance(window, int) else 0


def kv_layout(model_path: Path, block_size: int, tp: int = 1, pp: int = 1, dtype: str = "auto") -> KVLayout:
    """The KV of a checkpoint as workers of these ranks hold it. Raises CheckpointError, UnsupportedModelError."""
    try:
        sizes = msgspec.convert(read_json_object(model_path / "config.json"), _Sizes)
    except msgspec.ValidationError as exc:
        raise UnsupportedModelError(f"{model_path / 'config.json'} does not tell the shape of its KV: {exc}") from exc
    given = (sizes.dtype or sizes.torch_dtype or "float32") if dtype == "auto" else dtype
    name = given if given in DTYPE_BYTES else "bfloat16"
    if sizes.kv_lora_rank is not None:
        values = sizes.kv_lora_rank + sizes.qk_rope_head_dim
        region = KVRegion("latent", sizes.num_hidden_layers, 1, values, name, num_vectors=1)
        return KVLayout(block_size, (RegionCut(region, (sizes.num_hidden_layers,), tp),), tp)
    heads = sizes.num_key_value_heads or sizes.num_attention_heads
    head_dim = sizes.head_dim or sizes.hidden_size // sizes.num_attention_heads
    replicas = max(1, tp // heads)
    layout = paged_kv(sizes.num_hidden_layers, heads * replicas, block_size, head_dim, name, tp, pp, replicas)
    if layout.flaw is not None:
        raise UnsupportedModelError(f"{model_path.name} cannot have tp {tp} and pp {pp}: {layout.flaw}")
    return layout
