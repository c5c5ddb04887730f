"""One granted hand-off, seen from the prefill worker: read the hit blocks, write each finished chunk, say done.

                engine thread            transfer thread               event loop
    KvLoad ───────> load() ──submit──>  READ ──> engine.kv_loaded
    HandoffChunk ─> send() ──submit──>  WRITE ──> _written()
    last chunk ───> send() ──submit──>  WRITE + HandoffDone ──> _written() ──> _end(None)
                                                                        abandon() <── HandoffAbandon, connection lost

With checksums the checksum thread comes in between: before each submit of a WRITE, and after each READ. It takes chunks
in their order, and our blocks do not change between the step that computed them and ``sending_finished``.

The transfer thread keeps a peer's transfers in order and lets HandoffDone go only behind the writes before it, and
never after one of them has failed (they share a group).

Our blocks stay in use until every transfer and checksum of them has completed, whatever happens in between; only then
is the engine told ``sending_finished``. ``on_end`` runs exactly once, after that point.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from kvrelay.core.handoff import HandoffDone, HandoffGrant, RemotePrefillRequest
from kvrelay.core.layout import KVLayout
from kvrelay.core.messages import encode_message
from kvrelay.engine.base import HandoffChunk, KvLoad
from kvrelay.transfer.base import TransferOp
from kvrelay.transfer.plan import plan_blocks
from kvrelay.transfer.queues import OnDone
from kvrelay.transfer.thread import TransferThread
from kvrelay.worker.checksums import BlockChecksums
from kvrelay.worker.engine_thread import EngineThread

_log = logging.getLogger(__name__)


class OutgoingHandoff:
    """Drives the transfers of one hand-off. Methods may be called from the threads named in the module's figure."""

    def __init__(
        self,
        request: RemotePrefillRequest,
        grant: HandoffGrant,
        *,
        engine_request_id: str,
        layout: KVLayout,
        engine: EngineThread,
        transfer: TransferThread,
        checksums: BlockChecksums,
        on_computed: Callable[[], None],
        on_end: Callable[[str | None], None],
    ) -> None:
        self.request = request
        self.grant = grant
        self.engine_request_id = engine_request_id
        self.num_bytes = 0
        self.num_verified_blocks = 0
        self.num_checksum_mismatches = 0
        self._layout = layout
        self._engine = engine
        self._transfer = transfer
        self._checksums = checksums
        self._with_checksums = checksums.required or grant.checksums is not None
        self._sent_checksums: list[int] = []
        self._on_computed = on_computed
        self._on_end = on_end
        self._lock = threading.Lock()
        self._num_in_flight = 0
        self._all_sent = False
        self._error: str | None = None
        self._ended = False
        self._started_s = time.monotonic()

    # -- engine thread ------------------------------------------------------------------------------------------------

    def load(self, load: KvLoad) -> None:
        """Read the decode worker's hit blocks into ours; the engine hears ``kv_loaded`` in any case."""
        with self._lock:
            if self._error is None:
                self._num_in_flight += 1
                self._submit(TransferOp.READ, load.first_block, load.block_ids, None, partial(self._read, load))
                return
        self._tell_loaded(ok=False)

    def send(self, chunk: HandoffChunk) -> None:
        """Write a computed chunk; the last one carries HandoffDone."""
        if chunk.last:
            self._on_computed()
        with self._lock:
            if self._error is not None:
                return
            self._all_sent = chunk.last
            self._num_in_flight += 1
            if self._with_checksums:
                self._checksums.compute(chunk.block_ids, partial(self._checksummed, chunk))
            else:
                self._write(chunk)

    # -- event loop ---------------------------------------------------------------------------------------------------

    def abandon(self, reason: str) -> None:
        """Stop: compute and write nothing more. ``on_end(reason)`` follows when no transfer is in flight."""
        with self._lock:
            if self._ended:
                return
            self._error = self._error or reason
            ends = self._close_if_idle()
        self._engine.post(lambda core: core.abort(self.engine_request_id))
        if ends:
            self._end()

    # -- transfer thread ----------------------------------------------------------------------------------------------

    def _read(self, load: KvLoad, error: str | None) -> None:
        if error is not None or not self._with_checksums:
            self._loaded(error)
            return
        known = self.grant.checksums
        sent = None if known is None else known[load.first_block : load.first_block + len(load.block_ids)]
        self._checksums.verify(load.block_ids, sent, partial(self._verified, load))

    def _loaded(self, error: str | None) -> None:
        """The read has ended. A failed one is no reason to give up: what was to be read can be computed."""
        self._tell_loaded(ok=error is None)
        with self._lock:
            self._num_in_flight -= 1
            ends = self._close_if_idle()
        if ends:
            self._end()

    def _written(self, error: str | None) -> None:
        with self._lock:
            self._num_in_flight -= 1
            newly_failed = error is not None and self._error is None
            self._error = self._error or error
            ends = self._close_if_idle()
        if newly_failed:
            self._engine.post(lambda core: core.abort(self.engine_request_id))
        if ends:
            self._end()

    # -- checksum thread ----------------------------------------------------------------------------------------------

    def _checksummed(self, chunk: HandoffChunk, checksums: tuple[int, ...] | None) -> None:
        with self._lock:
            if self._error is None and checksums is not None:
                self._sent_checksums += checksums
                self._write(chunk)
                return
        self._written("computed KV could not be checksummed" if checksums is None else None)

    def _verified(self, load: KvLoad, damage: str | None) -> None:
        if damage is None:
            self.num_verified_blocks += len(load.block_ids)
        else:
            self.num_checksum_mismatches += 1
            peer = self.request.decode_worker_id
            _log.warning(
                "KV that hand-off %s read from %s is computed instead: %s", self.grant.handoff_id, peer, damage
            )
        self._loaded(damage)

    # -- any thread, under the lock -----------------------------------------------------------------------------------

    def _write(self, chunk: HandoffChunk) -> None:
        notify = self._done_message(chunk) if chunk.last else None
        self._submit(TransferOp.WRITE, chunk.first_block, chunk.block_ids, notify, self._written)

    def _submit(
        self, op: TransferOp, first_block: int, block_ids: tuple[int, ...], notify: bytes | None, on_done: OnDone
    ) -> None:
        remote = self.grant.block_ids[first_block : first_block + len(block_ids)]
        plan = plan_blocks(self._layout, block_ids, remote)
        self.num_bytes += plan.num_bytes
        group = None if op is TransferOp.READ else self.engine_request_id
        self._transfer.submit(op, self.request.decode_worker_id, plan, notify, on_done=on_done, group=group)

    def _done_message(self, chunk: HandoffChunk) -> bytes:
        assert chunk.token_id is not None, "the last chunk carries the first token"
        return encode_message(
            HandoffDone(
                handoff_id=self.grant.handoff_id,
                generation=self.grant.generation,
                token_id=chunk.token_id,
                logprobs=chunk.logprobs,
                num_transferred_bytes=self.num_bytes + len(chunk.block_ids) * self._layout.block_bytes,
                prefill_s=time.monotonic() - self._started_s,
                checksums=tuple(self._sent_checksums) if self._with_checksums else None,
            )
        )

    def _close_if_idle(self) -> bool:
        """Whether this call is the one that ends the hand-off: nothing moves, and nothing more will be submitted."""
        if self._ended or self._num_in_flight > 0 or (self._error is None and not self._all_sent):
            return False
        self._ended = True
        return True

    # -- outside the lock ---------------------------------------------------------------------------------------------

    def _tell_loaded(self, *, ok: bool) -> None:
        self._engine.post(lambda core: core.kv_loaded(self.engine_request_id, ok))

    def _end(self) -> None:
        self._engine.post(lambda core: core.sending_finished(self.engine_request_id))
        self._on_end(self._error)
