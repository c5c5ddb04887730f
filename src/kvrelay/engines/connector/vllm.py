"""vLLM's KV connector that gives a kvrelay worker the KV of its requests: ``--vllm-connector kvrelay``.

vLLM loads this module by ``kv_connector_module_path`` in its engine process and in its workers. The class here only
translates between vLLM's calls and the two halves.

Loads are asynchronous for vLLM's scheduler: the request waits in WAITING_FOR_REMOTE_KVS until the worker half reports
it, and other requests go on. Saves may end after the step that computes the KV, also after the answer: each rank
reports them to the kvrelay worker (``terms.Report``), and vLLM keeps the blocks until every rank has saved them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvrelay.engines.connector.scheduler_half import Copies, SchedulerHalf, VllmRequest
from kvrelay.engines.connector.terms import decode_place
from kvrelay.engines.connector.worker_half import RankPart, WorkerHalf
from kvrelay.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass
class KvrelayMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """What the scheduler half tells the worker half, each step."""

    copies: Copies


class KvrelayConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # see above
    """One instance is the scheduler half, one per vLLM worker (rank) a worker half. vLLM waits for the report of every
    rank before a request counts as loaded, and before it frees the blocks of one that was saved. ``SupportsHMA``:
    layers of several kinds may be in groups with a block table each."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        place = decode_place(vllm_config.kv_transfer_config.kv_connector_extra_config)
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerHalf(place)
        else:
            ranks, model = vllm_config.parallel_config, vllm_config.model_config
            tp = get_tensor_model_parallel_rank(), ranks.tensor_parallel_size
            here = range(*model.get_layers_start_end_indices(ranks))
            num_layers = len(place.places.keys() & here)
            self._groups = layer_groups(kv_cache_config, place.layout.block_size)
            self._worker = WorkerHalf(place, RankPart.of(place.layout, num_layers, *tp), ranks.rank)

    # -- scheduler half -----------------------------------------------------------------------------------------------

    def get_num_new_matched_tokens(self, request: VllmRequest, num_computed_tokens: int) -> tuple[int, bool]:
        num_tokens = self._scheduler.num_to_load(request, num_computed_tokens)
        return num_tokens, num_tokens > 0

    def update_state_after_alloc(self, request: VllmRequest, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvrelayMetadata:
        state = scheduler_output.kv_connector_block_state
        return KvrelayMetadata(
            self._scheduler.plan(
                scheduler_output.num_scheduled_tokens, state.get_block_ids, scheduler_output.preempted_req_ids or ()
            )
        )

    def request_finished_all_groups(
        self, request: VllmRequest, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request.request_id), None

    # -- worker half --------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches, self._groups)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Before the forward pass."""
        assert isinstance(kv_connector_metadata, KvrelayMetadata)
        self._worker.begin(kv_connector_metadata.copies)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """After the forward pass was given to the device: its loads are asynchronous."""
        self._worker.load(self._copies)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request whose load is under way is in no forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are saved together after the forward pass."""

    def wait_for_save(self) -> None:
        """Nothing waits: the saves begin."""
        self._worker.save(self._copies)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return self._worker.take_saved(finished_req_ids) or None, self._worker.take_loaded() or None

    def drain(self) -> None:
        """Return when no copy is under way."""
        self._worker.drain()

    @property
    def _copies(self) -> Copies:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, KvrelayMetadata)
        return metadata.copies


def layer_groups(kv_cache_config: Any, block_size: int) -> dict[str, int]:
    """The number of each layer's group. Raises ConfigError for a group with blocks of another size."""
    for group in kv_cache_config.kv_cache_groups:
        if group.kv_cache_spec.block_size != block_size:
            raise ConfigError(
                f"vLLM has blocks of {group.kv_cache_spec.block_size} tokens for {group.layer_names[0]}, "
                f"not of {block_size} as for others: kvrelay's connector copies equal blocks only, use nixl"
            )
    return {name: number for number, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
