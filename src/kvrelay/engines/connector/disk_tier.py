"""kvrelay's disk tier below vLLM's own offloading: a secondary tier of its ``TieringOffloadingSpec``.

    GPU <── vLLM ──> its CPU tier <── load, store ──> DiskStore: files that prove themselves (``tiers/block.py``)

vLLM's scheduler names blocks by keys of bytes, and asks without waiting: what takes time runs on two threads, one for
loads and one for stores. A key's SHA-256 stands where a stored block has its tokens, and its first 8 bytes where it has
its sequence hash; so the whole key is verified with the bytes, on the copy in vLLM's CPU tier.

vLLM makes the class from its configuration, ``type: KvrelayDiskTier`` and ``module_path``: this module's name. The
module is imported in vLLM's process only.
"""

from __future__ import annotations

import hashlib
import json
import queue
import struct
import time
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash
from vllm.v1.kv_offload.base import LookupResult, Medium, RequestOffloadingContext
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from kvrelay.config.byte_sizes import parse_bytes
from kvrelay.executors.torch.shards import weights_fingerprint
from kvrelay.tiers.block import FORMAT, TOKEN_BYTES, BlockName, Shape
from kvrelay.tiers.disk import DiskStore

_HASH = struct.Struct("<Q")
DIGEST_BYTES = hashlib.sha256().digest_size
WEEK_S = 7 * 86400.0


class KvrelayDiskTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there when types are checked
    """``directory`` and ``max_bytes`` ("100GiB") as in ``--disk-kv-cache``. Raises ConfigError."""

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        directory: str,
        max_bytes: str,
        max_age_s: float = WEEK_S,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._view = primary_kv_view.cast("B")
        block_bytes = self.block_size_bytes
        shape = Shape(_fingerprint(offloading_spec, block_bytes), DIGEST_BYTES // TOKEN_BYTES, block_bytes)
        self._store = DiskStore(Path(directory), shape, parse_bytes(max_bytes, "max_bytes"), max_age_s)
        self._store.changes.ignore()  # vLLM has events of its own
        self._lanes = {each: ThreadPoolExecutor(1, thread_name_prefix=f"kvrelay-{each}") for each in ("load", "store")}
        self._running: set[int] = set()
        self._ended: queue.SimpleQueue[JobResult] = queue.SimpleQueue()

    def lookup(self, key: bytes, req_context: object) -> LookupResult:
        return LookupResult.HIT if self._store.holds(name_of(key).sequence_hash) else LookupResult.MISS

    def submit_store(self, job_metadata: Any) -> None:
        self._submit("store", job_metadata, self._store_block)

    def submit_load(self, job_metadata: Any) -> None:
        self._submit("load", job_metadata, self._store.load)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        while not self._ended.empty():
            result = self._ended.get()
            self._running.discard(result.job_id)
            yield result

    def touch(self, keys: Collection[bytes], req_context: object) -> None:
        for key in keys:
            self._store.touch(name_of(key).sequence_hash)

    def on_new_request(self, req_context: object) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def has_pending_work(self) -> bool:
        return bool(self._running)

    def drain_jobs(self) -> None:
        for lane in self._lanes.values():
            lane.submit(lambda: None).result()

    def shutdown(self) -> None:
        for lane in self._lanes.values():
            lane.shutdown()
        self._store.close()
        self._view.release()

    def _submit(self, lane: str, job: Any, move: Callable[[BlockName, memoryview], bool]) -> None:
        self._running.add(job.job_id)
        self._lanes[lane].submit(self._run, job, move)

    def _run(self, job: Any, move: Callable[[BlockName, memoryview], bool]) -> None:
        """On a lane's thread: each block by itself, so that one that is lost takes no other with it."""
        began_s = time.monotonic()
        moved = []
        for key, number in zip(job.keys, job.chunk_ids, strict=True):
            at = int(number) * self.block_size_bytes
            if move(name_of(key), self._view[at : at + self.block_size_bytes]):
                moved.append(key)
        is_whole = len(moved) == len(job.keys)
        self._ended.put(
            JobResult(
                job.job_id,
                success=is_whole,
                successful_keys=None if is_whole or not job.is_promotion or not moved else tuple(moved),
                transfer_time=time.monotonic() - began_s,
                transfer_bytes=len(moved) * self.block_size_bytes,
            )
        )

    def _store_block(self, name: BlockName, payload: memoryview) -> bool:
        """vLLM keeps the block in its place until the job has ended: so this waits for the write."""
        self._store.write(name, payload).result()
        return self._store.holds(name.sequence_hash)


def name_of(key: bytes) -> BlockName:
    """A key as a block's name."""
    digest = hashlib.sha256(key).digest()
    return BlockName(_HASH.unpack_from(digest)[0], None, digest)


def _fingerprint(spec: Any, block_bytes: int) -> bytes:
    """[16]. What must agree before vLLM's bytes may be used: model, weights if they lie here, groups, ranks, format."""
    fields = FileMapper.from_offloading_spec("", spec, spec.blocks_per_chunk).fields
    model = Path(fields["model_name"])
    weights = weights_fingerprint(model) if model.is_dir() else ""
    described = json.dumps([FORMAT.decode(), weights, block_bytes, fields], sort_keys=True)
    return xxhash.xxh3_128_digest(described.encode())
