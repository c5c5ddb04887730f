"""``POST /v1/load_lora_adapter`` and ``/v1/unload_lora_adapter`` as vLLM's server answers them, for a whole cluster.

For operators only. An adapter's files must be at ``lora_path`` for this frontend, which names their contents, and for
every worker of the model, which loads them.
"""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import TypeVar

import msgspec

from kvrelay.core.adapters import AdapterEntry
from kvrelay.data.adapter_files import AdapterMissingError, model_shapes, read_adapter
from kvrelay.errors import InvalidInputError
from kvrelay.frontend.api.cluster_shown import NotPermittedError
from kvrelay.frontend.cluster.models import Model
from kvrelay.frontend.cluster.view import ClusterView
from kvrelay.frontend.openai.bounds import Name
from kvrelay.frontend.openai.requests import parse_body
from kvrelay.http import Exchange, HttpRequest, Response

LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
MAX_NAME_CHARS = 256


class AdapterNotFoundError(InvalidInputError):
    """No adapter of that name was loaded."""

    status = 404


class LoadAdapterRequest(msgspec.Struct, frozen=True):
    """``POST /v1/load_lora_adapter``. ``base_model_name``: needed if several models are served."""

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    base_model_name: Name | None = None


class UnloadAdapterRequest(msgspec.Struct, frozen=True):
    """``POST /v1/unload_lora_adapter``. ``lora_int_id`` has no effect, as with vLLM."""

    lora_name: Name
    lora_int_id: int | None = None


Body = TypeVar("Body", LoadAdapterRequest, UnloadAdapterRequest)


class AdapterEndpoints:
    """The handlers that ``FrontendApp`` expects. This frontend loads or unloads one adapter at a time."""

    def __init__(self, cluster: ClusterView) -> None:
        self._cluster = cluster
        self._lock = asyncio.Lock()

    async def load(self, exchange: Exchange, request_id: str) -> None:
        """Raises InvalidInputError, WorkerUnavailableError, ControlUnavailableError."""
        request = _read(exchange, LoadAdapterRequest)
        name = request.lora_name
        if not name or not request.lora_path:
            raise InvalidInputError("Both 'lora_name' and 'lora_path' must be provided.")
        if len(name) > MAX_NAME_CHARS or not name.isprintable():
            raise InvalidInputError(
                f"lora_name must be {MAX_NAME_CHARS} printable characters at most", param="lora_name"
            )
        for field in ("load_inplace", "is_3d_lora_weight"):
            if getattr(request, field):
                raise InvalidInputError(f"{field} is not supported: unload the adapter, then load it", param=field)
        async with self._lock:
            model = self._base_of(request)
            self._require_free(name)
            entry = await asyncio.to_thread(_read_files, request, model)
            self._require_loaders(model.name)
            await self._cluster.adapters.load(entry)
        exchange.respond(_done(name, "added"))

    def _base_of(self, request: LoadAdapterRequest) -> Model:
        models = self._cluster.listed_models()
        if request.base_model_name is None and len(models) > 1:
            names = ", ".join(model.name for model in models)
            raise InvalidInputError(f"base_model_name must say for which model: {names}", param="base_model_name")
        return self._cluster.model(request.base_model_name)

    def _require_free(self, name: str) -> None:
        served = self._cluster.listed_models()
        if any(each.name == name for each in served):
            raise InvalidInputError(f"The lora adapter '{name}' conflicts with a served base model.", param="lora_name")
        if name in self._cluster.adapters.known() or any(name in each.adapters for each in served):
            raise InvalidInputError(
                f"The lora adapter '{name}' has already been loaded. Unload it first, to load other contents.",
                param="lora_name",
            )

    def _require_loaders(self, model: str) -> None:
        """A worker that loads none does not say so itself."""
        for info in self._cluster.adapters.workers_of(model):
            if not info.max_adapters:
                raise InvalidInputError(
                    f"worker {info.worker_id} (engine {info.engine}) loads no adapters at run time: that needs "
                    "--engine vllm with --max-loras"
                )

    async def unload(self, exchange: Exchange, request_id: str) -> None:
        """Raises InvalidInputError, WorkerUnavailableError, ControlUnavailableError."""
        name = _read(exchange, UnloadAdapterRequest).lora_name
        if not name:
            raise InvalidInputError("'lora_name' needs to be provided to unload a LoRA adapter.", param="lora_name")
        async with self._lock:
            entry = self._cluster.adapters.known().get(name)
            if entry is None:
                if any(name in model.adapters for model in self._cluster.models):
                    raise InvalidInputError(
                        f"The lora adapter '{name}' is one of --lora-dir: it goes with its workers.", param="lora_name"
                    )
                raise AdapterNotFoundError(f"The lora adapter '{name}' cannot be found.", param="lora_name")
            await self._cluster.adapters.unload(entry)
        exchange.respond(_done(name, "removed"))


def _read(exchange: Exchange, kind: type[Body]) -> Body:
    """The body. Raises NotPermittedError for one of several clients, InvalidInputError.

    Only JSON by its content type: pages of other origins cannot send that with a browser's stored key."""
    _require_operator(exchange.request)
    media = exchange.request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise InvalidInputError("Unsupported Media Type: Only 'application/json' is allowed")
    request = parse_body(exchange.request.body, kind)
    exchange.drop_body()
    return request


def _require_operator(request: HttpRequest) -> None:
    if request.client:
        raise NotPermittedError("adapters are loaded and unloaded with a key of --metrics-keys-file")


def _read_files(request: LoadAdapterRequest, model: Model) -> AdapterEntry:
    """Raises ConfigError; with status 404 if they are not there."""
    path = Path(request.lora_path).absolute()
    try:
        adapter = read_adapter(path, request.lora_name, model_shapes(Path(model.root)), "lora_path")
    except AdapterMissingError as exc:
        where = f"on {socket.gethostname()}; frontends read an adapter's files, too, at the same path as workers"
        raise AdapterMissingError(f"{exc.message} {where}", param="lora_path") from exc
    return AdapterEntry(request.lora_name, model.name, str(path), adapter.digest)


def _done(name: str, what: str) -> Response:
    message = f"Success: LoRA adapter '{name}' {what} successfully."
    return Response(200, message.encode(), b"text/plain; charset=utf-8")
