"""The adapters (LoRA) of a worker with vLLM: those of ``--lora-dir``, and those that come and go at run time.

vLLM is told an adapter's id as its name; so its own block hashes, and the events of its cache, tell adapters apart by
content. All of a worker's adapters stay in vLLM's host memory: none is read again from a file that may have changed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from kvrelay.config import VllmConfig
from kvrelay.core.adapters import AdapterEntry
from kvrelay.data.adapter_files import CONFIG, RANKS, Adapter, model_shapes, read_adapter
from kvrelay.engines.hosted.backend import one_line
from kvrelay.errors import ConfigError, InvalidInputError, WorkerUnavailableError

DEFAULT_SLOTS = 4
DEFAULT_RANK = 16
"""vLLM's own."""
RUN_TIME_ROOM = 32


def read_adapters(directory: str, model_path: Path, model: str) -> tuple[Adapter, ...]:
    """Those in ``directory``, in order of their names, each named by its folder; none if it is empty. ``model``: the
    name that is served.

    Raises ConfigError for one that vLLM could not load.
    """
    if not directory:
        return ()
    folder = Path(directory)
    paths = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not paths:
        raise _error(f"{directory} has no folder with an {CONFIG}")
    if any(path.name == model for path in paths):
        raise _error(f"adapter {model} has the name of its model")
    shapes = model_shapes(model_path)
    return tuple(read_adapter(path, path.name, shapes, "lora_dir") for path in paths)


def adapter_arguments(adapters: tuple[Adapter, ...], config: VllmConfig) -> dict[str, Any]:
    """Of vLLM's AsyncEngineArgs: what it reserves at its start. None if there are no adapters, and none are loaded at
    run time (``max_loras``). Raises ConfigError for limits below what ``--lora-dir`` needs."""
    num_slots = config.max_loras or min(len(adapters), DEFAULT_SLOTS)
    if not num_slots:
        return {}
    own = max((each.rank for each in adapters), default=1)
    rank = config.max_lora_rank or max(own, DEFAULT_RANK if config.max_loras else 1)
    if own > rank or rank > RANKS[-1]:
        highest = f"{own} to {RANKS[-1]}" if adapters else f"1 to {RANKS[-1]}"
        raise ConfigError(f"--max-lora-rank {rank} is not {highest}", param="max_lora_rank")
    room = config.max_cpu_loras or max(len(adapters), RUN_TIME_ROOM if config.max_loras else 0, num_slots)
    if room < max(len(adapters), num_slots):
        raise ConfigError(
            f"--max-cpu-loras {room} is less than the {len(adapters)} adapters of --lora-dir or the {num_slots} of "
            "--max-loras: all of them stay in host memory",
            param="max_cpu_loras",
        )
    return {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": room,
        "max_lora_rank": next(each for each in RANKS if each >= rank),
    }


def with_empty_slot(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's arguments for a CPU, with more slots than adapters, so that the last one is always empty.

    In a step with an adapter, vLLM's CPU operators give a row without one the index -1, which is the last slot: the
    model's own answers would get that slot's adapter (vLLM's pull requests 48421 and 49656). Slots are filled from the
    first, and an empty one adds zero."""
    if "max_cpu_loras" not in arguments:
        return dict(arguments)
    num_slots = max(arguments["max_loras"], arguments["max_cpu_loras"] + 1)
    return {**arguments, "max_loras": num_slots, "max_cpu_loras": num_slots}


class AdapterEngine(Protocol):
    """The part of vLLM's AsyncLLM that is used."""

    async def add_lora(self, lora_request: object) -> bool:
        """Load an adapter, between two steps."""

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter that no request uses."""


class LoadedAdapters:
    """What vLLM has, by id: an ``AdapterStore``. ``request_of`` makes vLLM's LoRARequest of an adapter's id, its number
    (vLLM's key of it) and path. ``max_adapters``: how many there may be; each has a rank of at most ``max_rank``.

    Never more than that are at vLLM, so vLLM evicts none, and the empty slot of a CPU stays empty. One event loop's;
    ``has`` may be asked from any thread."""

    def __init__(
        self,
        engine: AdapterEngine,
        request_of: Callable[[str, int, str], object],
        adapters: Iterable[Adapter] = (),
        *,
        model_path: Path = Path(),
        max_adapters: int = 0,
        max_rank: int = 0,
    ) -> None:
        self._engine, self._request_of = engine, request_of
        self._model_path = model_path
        self._max_adapters, self._max_rank = max_adapters, max_rank
        self._numbers = itertools.count(1)
        self._loaded: dict[str, tuple[int, object]] = {}
        """By id, number and vLLM's request."""
        for adapter in adapters:
            self._loaded[adapter.id] = self._numbered(adapter)
        self._lock = asyncio.Lock()

    def _numbered(self, adapter: Adapter) -> tuple[int, object]:
        number = next(self._numbers)
        return number, self._request_of(adapter.id, number, str(adapter.path))

    @property
    def is_full(self) -> bool:
        return len(self._loaded) >= self._max_adapters

    def has(self, adapter: str) -> bool:
        return not adapter or adapter in self._loaded

    def request(self, adapter: str) -> object | None:
        """vLLM's for a request with that adapter; None: without one. Raises WorkerUnavailableError."""
        if not self.has(adapter):
            raise WorkerUnavailableError(f"this worker has no adapter {adapter}")
        return self._loaded[adapter][1] if adapter else None

    async def open(self) -> None:
        """Those of the start."""
        for _, request in list(self._loaded.values()):
            await self._engine.add_lora(request)

    async def load(self, entry: AdapterEntry) -> None:
        async with self._lock:
            if entry.id in self._loaded:
                return
            if self.is_full:
                raise InvalidInputError(
                    f"this worker has {len(self._loaded)} adapters, with those that still answer, as many as "
                    f"--max-cpu-loras {self._max_adapters} allows: unload one"
                )
            adapter = await asyncio.to_thread(self._read, entry)
            if adapter.rank > self._max_rank:
                raise InvalidInputError(
                    f"adapter {entry.name} has rank {adapter.rank}, above --max-lora-rank {self._max_rank}"
                )
            number, request = self._numbered(adapter)
            try:
                await self._engine.add_lora(request)
            except Exception as exc:  # it raises what its processes raise
                raise InvalidInputError(f"vLLM refuses adapter {entry.name}: {one_line(exc)}") from exc
            try:
                # Then they were these while vLLM read them, too.
                await asyncio.to_thread(self._read, entry)
            except InvalidInputError:
                await self._engine.remove_lora(number)
                raise
            self._loaded[entry.id] = number, request

    async def drop(self, adapter: str) -> None:
        async with self._lock:
            # First here: vLLM would read it again for a request that came meanwhile.
            number, request = self._loaded.pop(adapter)
            try:
                await self._engine.remove_lora(number)
            except Exception as exc:  # it raises what its processes raise
                self._loaded[adapter] = number, request
                raise WorkerUnavailableError(f"vLLM does not forget adapter {adapter}: {one_line(exc)}") from exc

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return model_shapes(self._model_path)

    def _read(self, entry: AdapterEntry) -> Adapter:
        adapter = read_adapter(Path(entry.path), entry.name, self._shapes, "lora_path")
        if adapter.id != entry.id:
            raise InvalidInputError(
                f"adapter {entry.name} was replaced: {entry.path} has the contents {adapter.digest}, {entry.digest} "
                "were loaded; unload it, then load it anew"
            )
        return adapter


def _error(message: str) -> ConfigError:
    return ConfigError(message, param="lora_dir")
